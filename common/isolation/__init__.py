"""Does the network isolate? What a small message of the high class waits: alone, under bulk of its own class, and under
bulk of KV's class (paper §5). Through the project's transports, each end of it in a process of its own.

A one-sided write that is awaited is a round trip: it returns when the other side has said that the bytes are in place.
"""
