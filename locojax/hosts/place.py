"""Which of the run's hosts this process is, as its environment says. No jax, no other host."""

from __future__ import annotations

import dataclasses
import importlib.util
import pathlib
from collections.abc import Mapping

from locojax.config import HostsConfig
from locojax.errors import ConfigError

COORDINATOR, NUM_HOSTS, HOST_ID = "LOCOJAX_COORDINATOR", "LOCOJAX_NUM_HOSTS", "LOCOJAX_HOST_ID"
"""Where a host finds the others: address of host 0 (HOST:PORT), how many there are, and which one this is (from 0)."""
LAUNCHED_AT = "LOCOJAX_LAUNCHED_AT"
"""When all hosts were started, as run names have it."""

_CLUSTER_SIGNS = ("JAX_COORDINATOR_ADDRESS", "MEGASCALE_COORDINATOR_ADDRESS")
_CLUSTER_SIZES = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")


@dataclasses.dataclass(frozen=True)
class Place:
    """Where this process stands. All None: jax finds out. Example: Place("127.0.0.1:9000", num_hosts=2, rank=1)"""

    address: str | None = None
    num_hosts: int | None = None
    rank: int | None = None


def find_place(config: HostsConfig, environment: Mapping[str, str]) -> Place | None:
    """Where this process stands among the hosts; None: it is alone.

    Raises:
      ConfigError: the environment says only a part of it, or what is no number.
    """
    if config.distributed == "off":
        return None
    given = {name: environment[name] for name in (COORDINATOR, NUM_HOSTS, HOST_ID) if environment.get(name)}
    if not given:
        in_cluster = any(environment.get(name) for name in _CLUSTER_SIGNS)
        in_cluster |= any(environment.get(name, "1") not in ("", "1") for name in _CLUSTER_SIZES)
        in_cluster |= "," in environment.get("TPU_WORKER_HOSTNAMES", "")
        return Place() if config.distributed == "on" or in_cluster else None
    try:
        place = Place(given[COORDINATOR], int(given[NUM_HOSTS]), int(given[HOST_ID]))
    except (KeyError, ValueError):
        said = ", ".join(f"{name}={value}" for name, value in given.items())
        raise ConfigError(
            "The environment does not say where this host stands",
            got=said,
            expected=f"{COORDINATOR} (host:port), {NUM_HOSTS} and {HOST_ID} (integers), all three or none",
        ) from None
    assert place.num_hosts is not None and place.rank is not None
    if not 0 <= place.rank < place.num_hosts:
        raise ConfigError(
            "This host's number is not one of the run's",
            got=f"{HOST_ID}={place.rank}",
            expected=f"0 to {place.num_hosts - 1}",
        )
    return place if place.num_hosts > 1 else None


_GOOGLE = "0x1ae0"
"""PCI vendor of TPUs, as Linux names it."""
_GPU_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin", "jax_rocm7_plugin", "jax_rocm60_plugin")


def platforms_to_try(environment: Mapping[str, str], root: pathlib.Path = pathlib.Path("/")) -> str | None:
    """What JAX_PLATFORMS should be, before jax is imported; None: jax finds out.

    libtpu may be there for its compiler alone. jax would start it all the same, and without a TPU it fills the screen
    with errors that are none, and holds a lock that keeps `locojax fit` from it. Any sign of an accelerator leaves the
    choice to jax.
    """
    if "JAX_PLATFORMS" in environment or importlib.util.find_spec("libtpu") is None:
        return None
    signs = any(name.startswith("TPU_") for name in environment) or any(map(importlib.util.find_spec, _GPU_PLUGINS))
    devices = [*root.glob("dev/accel*"), *root.glob("dev/vfio/*"), *root.glob("dev/nvidia*"), *root.glob("dev/kfd")]
    vendors = (path.read_text().strip() for path in root.glob("sys/bus/pci/devices/*/vendor"))
    return None if signs or devices or _GOOGLE in vendors else "cpu"


TUNABLES = "GLIBC_TUNABLES"
_HUGE_PAGES = "glibc.malloc.hugetlb"


def with_huge_pages(environment: Mapping[str, str]) -> dict[str, str]:
    """What to add to the environment of a process that computes on CPUs, so that glibc asks for huge pages.

    XLA takes the memory of a program's temporaries anew at each call, and a training program touches a gigabyte of it:
    4 KiB at a time, that was a twentieth of the time. Other C libraries don't read the variable; what it says already
    stays.
    """
    set_already = environment.get(TUNABLES, "")
    if _HUGE_PAGES in set_already:
        return {}
    return {TUNABLES: ":".join(filter(None, (set_already, f"{_HUGE_PAGES}=1")))}
