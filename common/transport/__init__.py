"""One-sided bulk transfer between registered regions: shm, tcp, null behind one contract (common.transport.base)."""
