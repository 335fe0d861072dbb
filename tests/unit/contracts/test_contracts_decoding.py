import subprocess
import sys

FIRST_USES = """
import dataclasses, sys, threading
import msgspec
from rollbook.contracts.decoding import convert, json_decoder, msgpack_decoder

sys.setswitchinterval(1e-6)


def decode(kind, together, number):
    row = {f"f{n}": None if n % 2 else {f"x{m}": m for m in range(30)} for n in range(60)}
    together.wait()
    if number % 3 == 0:
        decoded = json_decoder(kind).decode(msgspec.json.encode(row))
    elif number % 3 == 1:
        decoded = msgpack_decoder(kind).decode(msgspec.msgpack.encode(row))
    else:
        decoded = convert(row, kind)
    assert decoded.f0.x1 == 1


for number in range(150):
    make = dataclasses.make_dataclass if number % 2 else msgspec.defstruct
    inner = make(f"Inner{number}", [(f"x{n}", int) for n in range(30)])
    kind = make(f"Outer{number}", [(f"f{n}", "int | None" if n % 2 else inner) for n in range(60)])
    together = threading.Barrier(6)
    threads = [threading.Thread(target=decode, args=(kind, together, n)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def test_threads_may_decode_a_class_for_the_first_time_together() -> None:
    done = subprocess.run([sys.executable, "-c", FIRST_USES], capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
