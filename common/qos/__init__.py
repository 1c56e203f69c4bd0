"""What a network has to be told to isolate the project's traffic classes (paper §5), for each kind of network. Pure.

Classes, code points and service levels are those of common.transport.classes, shares those of network.qos.
"""
