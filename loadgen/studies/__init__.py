"""What the simulator is asked: one cluster, a live result again, roles that follow the load."""
