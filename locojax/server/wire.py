"""The wire: the large requests of the Tinker API and their results, between bytes and the values the rest works with.

    bytes --wire_content--> plain bytes --wire_tensors--> arrays --wire_train, wire_sample--> TrainBody, SampleBody
    --wire_checks--> the same, known to fit the engine;  the engine's result --wire_results--> bytes

All of it is pure functions, meant for a pool of threads. Whatever the bytes are, the only exception is `WireError`.
The small requests are in `requests`, what answers them is in `responses`.
"""

from __future__ import annotations

from locojax.server.wire_checks import validate_sample, validate_train
from locojax.server.wire_errors import WireError
from locojax.server.wire_results import encode, wants_protobuf
from locojax.server.wire_sample import SampleBody, decode_sample
from locojax.server.wire_tensors import Csr
from locojax.server.wire_train import Provenance, Span, TrainBody, decode_train

__all__ = [
    "Csr",
    "Provenance",
    "SampleBody",
    "Span",
    "TrainBody",
    "WireError",
    "decode_sample",
    "decode_train",
    "encode",
    "validate_sample",
    "validate_train",
    "wants_protobuf",
]
