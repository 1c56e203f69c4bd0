"""KV-cache blocks: geometry, keys, buffer pool. Pure: no asyncio, no zmq, no torch."""
