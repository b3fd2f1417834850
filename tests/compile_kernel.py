"""Compile room 17's kernels for GPUs that are not here, and say what came out. Run by its spec.

python tests/compile_kernel.py KERNEL.py [80|90]  ->  one JSON line per kernel and setting

It runs in a process of its own: Triton's interpreter and its compiler cannot share one. Nothing is
executed on a GPU; the wheel of Triton carries the assembler and the tool that reads its result.
"""

import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024}  # bytes that one program may use


SHAPES = [  # heads per kv head, block size, head size, splits, window, causal, number type
    (4, 16, 128, 16, 0, False, "bf16"),  # the Qwen3-4B and 8B drafters, decoding
    (4, 16, 128, 1, 0, False, "fp16"),  # the same, packed training
    (8, 16, 64, 4, 128, False, "bf16"),  # a sliding window
    (3, 10, 80, 1, 0, True, "bf16"),  # nothing here is a power of two; causal inside the block
    (2, 8, 32, 1, 0, False, "fp32"),  # float32, which must not become TF32
]


def compile_one(function, capability, types, constants, options):
    """Compile one kernel and read its resources."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = function.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    # Tensors start at multiples of 16 bytes, and row strides of whole heads are multiples of 16.
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, n in enumerate(names)
        if signature[n].startswith("*") or n in ("kr", "kg", "ks")
    }
    source = ASTSource(function, signature=signature, constexprs=constants, attrs=aligned)
    target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
    made = triton.compile(source, target=target, options=options)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        )
    report = usage.stdout + usage.stderr
    ptx = made.asm["ptx"]
    return {
        "shared": made.metadata.shared,
        "registers": int(re.search(r"REG:(\d+)", report)[1]),
        "stack": int(re.search(r"STACK:(\d+)", report)[1]),
        "tensor_cores": "wgmma.mma_async" in ptx or "mma.sync" in ptx,
        "tf32": "tf32" in ptx,
    }


def load(path: Path):
    """The room in this file, under a name of its own."""
    spec = importlib.util.spec_from_file_location("kernel_under_test", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def jobs(room, capability, shape):
    """(name, kernel, argument types, constants, launch options) of all that one shape launches."""
    heads, block, size, splits, window, causal, number = shape
    plan = dict(room.plan(heads, block, size, 4 if number == "fp32" else 2, capability))
    options = {name: plan.pop(name) for name in ("num_warps", "num_stages")}
    types = {n: f"*{number}" for n in ("Q", "KC", "VC", "KB", "VB")}
    types |= {"ANCHORS": "*i64", "LSE": "*fp32", "scale": "fp32"}
    types["OUT"] = "*fp32" if splits > 1 else f"*{number}"
    fixed = dict(HEADS=heads, B=block, D=size, WINDOW=window, CAUSAL=causal, UPCAST=False)
    yield "attend_block", room.attend_block, types, fixed | plan | {"SPLITS": splits}, options
    if splits > 1:
        types = {"PARTS": "*fp32", "LSES": "*fp32", "OUT": f"*{number}", "LSE": "*fp32"}
        rows = max(1, 8192 // (splits * plan["E"]))
        yield "combine", room.combine, types, dict(P=splits, D=size, M=rows, E=plan["E"]), {}


def backward_jobs(attend, capability, shape):
    """The same for the two kernels of the gradient."""
    heads, block, size, splits, window, causal, number = shape
    plan = dict(attend.backward_plan(heads, block, size, 2, capability))
    options = {name: plan.pop(name) for name in ("num_warps", "num_stages")}
    tensors = ("Q", "KC", "VC", "KB", "VB", "GRAD", "DQ", "DKB", "DVB", "DKC", "DVC")
    types = {n: f"*{number}" for n in tensors}
    types |= {"ANCHORS": "*i64", "LSE": "*fp32", "DELTA": "*fp32", "scale": "fp32"}
    fixed = dict(HEADS=heads, B=block, D=size, WINDOW=window, CAUSAL=causal, UPCAST=False) | plan
    yield "backward_block", attend.backward_block, types, fixed, options
    fixed = {name: value for name, value in fixed.items() if name != "OWN"}
    yield "backward_context", attend.backward_context, types, fixed, options


def main(path: str, arch: str = "") -> None:
    """Every setting of a room's kernels, or of the gradient's for the word "backward"."""
    if path == "backward":
        from minidflash.kit import attend

        work = partial(backward_jobs, attend)
    else:
        work = partial(jobs, load(Path(path)))
    for number in [int(arch)] if arch else SHARED_LIMIT:
        capability = divmod(number, 10)
        for shape in SHAPES[:2] if path == "backward" else SHAPES:
            for name, kernel, types, constants, options in work(capability, shape):
                head = {"kernel": name, "arch": number, "shape": str(shape), "number": shape[-1]}
                row = compile_one(kernel, capability, types, constants, options)
                print(json.dumps(head | row | {"limit": SHARED_LIMIT[number]}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
