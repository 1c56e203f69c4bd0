"""One-sided writes over RDMA verbs (pyverbs): RC queue pairs, RDMA WRITE in linked lists, notices by immediate data.

nics.py picks device, port and GID; device.py opens them and registers memory; work.py holds the work requests, built
once; queue_pair.py is one RC queue pair and its completions; control.py the messages that set connections up;
writer.py and listener.py the two ends of a connection; mover.py is the way to move bytes that transports choose.
pyverbs is imported only when a device is looked for.
"""
