"""`loadgen paper`: the paper's tables and figures out of the simulator and the models, ours beside the published.

published.py holds what the paper reports, calibration.py which constants were fitted to which of it; everything else is
held out. An exhibit (exhibit.py) is one table or figure: rows with a published number or without one, and panels to
plot. Nothing is tuned for one of them. Point values of Figures 3 and 7 to 15 are images: there only the ratios of the
text are published, and axes that the text does not give are ours.
"""
