"""What two hosts of one cluster must have in common: protocol, the blocks of their model, MTU. A host that differs is
refused by the scheduler when it registers; the doctor says so before that."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from common.config import Config
from common.model import Manifest, read_configured_model, read_model_directory
from common.wire import PROTOCOL_VERSION
from services.launcher.doctor.check import Check, Level

#: Stands for the digest of weights that were not read, which takes as long as loading them.
UNREAD = "unread"


def read_manifest(config: Config) -> Manifest | None:
    """What the configured model's blocks depend on; the digest of its weights is the configured one, or UNREAD. None
    without a model here. ConfigError for one that cannot be served."""
    model = config.model
    if model.profile:
        return read_configured_model(config).manifest
    path = Path(model.path)
    if not model.path or not path.is_dir():
        return None
    return read_model_directory(path, model.dtype, model.block_size, model.digest or UNREAD).manifest


def judge_protocol(peer: int) -> Check:
    """peer: its PROTOCOL_VERSION."""
    level = Level.OK if peer == PROTOCOL_VERSION else Level.FAIL
    fix = "" if peer == PROTOCOL_VERSION else "install one version of dualpath on both hosts"
    return Check("protocol of both hosts", level, f"{PROTOCOL_VERSION} here, {peer} there", fix)


def judge_model(own: Manifest | None, peer: Manifest | None) -> Check:
    name = "model of both hosts"
    if own is None or peer is None:
        where = "here" if own is None else "there"
        return Check(name, Level.OK, f"not known {where}: the scheduler compares them when they register")
    unread = UNREAD in (own.model_digest, peer.model_digest)
    if unread:
        own, peer = replace(own, model_digest=UNREAD), replace(peer, model_digest=UNREAD)
    difference = own.difference(peer)
    if difference is not None:
        fix = "give both hosts the same model, dtype and block size ([model]; [perf], if it is profiled)"
        return Check(name, Level.FAIL, f"{difference} (here != there)", fix)
    geometry = own.geometry
    told = f"{geometry.num_layers} layers, blocks of {geometry.block_size} tokens, {geometry.full_block_bytes} bytes"
    return Check(name, Level.OK, f"the same: {told}{'; weights not compared' if unread else ''}")


def judge_mtu(own: int, peer: int) -> Check:
    """Of the compute interfaces, bytes; 0: not known."""
    if 0 in (own, peer):
        return Check("MTU between hosts", Level.OK, "not known here: the set-up of a queue pair compares it")
    level = Level.OK if own == peer else Level.FAIL
    fix = "" if own == peer else "set one MTU on both hosts and every switch between them"
    return Check("MTU between hosts", level, f"{own} here, {peer} there", fix)
