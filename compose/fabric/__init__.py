"""Two shaped networks on one machine: namespaces for the nodes, each with a storage and a compute NIC of a given rate.

    with Fabric.up(2, 4, snic_rate=26_000_000, cnic_rate=213_000_000) as fabric:
        subprocess.Popen([*fabric.prefix("p0"), *command], env={**os.environ, **fabric.environment("p0")})

Needs root, iproute2 and a kernel with namespaces and htb; missing() says what is not there.
"""

from compose.fabric.fabric import Fabric
from compose.fabric.layout import CTL, STORE, Nic, parse_shape
from compose.fabric.shaping import Counter
from compose.fabric.system import missing

__all__ = ["CTL", "STORE", "Counter", "Fabric", "Nic", "missing", "parse_shape"]
