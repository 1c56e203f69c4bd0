"""Starting processes: children, a whole cluster on this host, the model it serves, the demo."""
