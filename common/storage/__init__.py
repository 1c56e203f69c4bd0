"""Where Full Blocks rest: the block store contract, the block file format, and the directory back end."""
