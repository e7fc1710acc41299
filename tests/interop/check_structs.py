"""The structs that Python declares for ctypes, in the tests and in the examples, against those of the headers: a C
program knows the size of each and where each field lies.

Usage: check_structs.py TOP COMPILER... -- [OPTION...]
TOP is the top of the tree. PyTorch is not needed: classes that want it are never made here. Exits with 77 (skipped)
without NumPy."""

import ctypes
import importlib.util
import os
import subprocess
import sys
import tempfile
import unittest.mock

try:
    import numpy
except ImportError as missing:
    print("skipped: %s" % missing)
    sys.exit(77)

CORE = {"Device": "fp8core_device", "Tensor": "fp8core_tensor", "ContextOptions": "fp8core_context_options"}
# Of each file the headers, and the C struct of each class.
FILES = {
    "tests/interop/fp8core_ctypes.py": (["fp8core/fp8core.h"], {
        **CORE, "CastOptions": "fp8core_cast_options", "ScalingOptions": "fp8core_scaling_options"}),
    "tests/interop/fp8optim_ctypes.py": (["fp8optim/fp8optim.h"], {
        "AdamWOptions": "fp8optim_adamw_options", "Group": "fp8optim_group", "Parameter": "fp8optim_parameter",
        "StepOptions": "fp8optim_step_options", "StepReport": "fp8optim_step_report", "Schedule": "fp8optim_schedule",
        "Memory": "fp8optim_memory"}),
    "tests/interop/fp8gpt_ctypes.py": (["fp8gpt/model.h"], {
        "Config": "fp8gpt_config", "ModelOptions": "fp8gpt_model_options", "Parameter": "fp8gpt_parameter",
        "Batch": "fp8gpt_batch"}),
    "tools/examples/optimizer/fp8adamw.py": (["fp8optim/fp8optim.h"], {
        **CORE, "Options": "fp8optim_adamw_options", "Group": "fp8optim_group", "Parameter": "fp8optim_parameter",
        "StepOptions": "fp8optim_step_options", "StepReport": "fp8optim_step_report", "Memory": "fp8optim_memory"}),
    "tools/examples/gradient-compression/fp8comm.py": (["fp8comm/fp8comm.h"], {
        **CORE, "CommunicatorOptions": "fp8comm_communicator_options", "GradientOptions": "fp8comm_gradient_options",
        "GradientResult": "fp8comm_gradient_result", "GradientStatistics": "fp8comm_gradient_statistics"}),
}


def module_of(path):
    sys.path.insert(0, os.path.dirname(path))
    spec = importlib.util.spec_from_file_location(os.path.basename(path)[:-3], path)
    module = importlib.util.module_from_spec(spec)
    with unittest.mock.patch.dict(sys.modules, {name: unittest.mock.MagicMock() for name in
                                                ("torch", "torch.distributed", "torch.nn", "torch.optim")}):
        spec.loader.exec_module(module)
    return module


def assertions(module, structs):
    for name, struct in structs.items():
        python = getattr(module, name)
        yield "sizeof(%s) == %d" % (struct, ctypes.sizeof(python))
        for field in python._fields_:
            place = getattr(python, field[0])
            yield "offsetof(%s, %s) == %d" % (struct, field[0], place.offset)
            yield "sizeof(((%s *)0)->%s) == %d" % (struct, field[0], place.size)


def main():
    top = sys.argv[1]
    end = sys.argv.index("--")
    compiler, options = sys.argv[2:end], sys.argv[end + 1:]
    failed = 0
    for path, (headers, structs) in FILES.items():
        module = module_of(os.path.join(top, path))
        declared = {name for name, value in vars(module).items()
                    if isinstance(value, type) and issubclass(value, ctypes.Structure) and value.__module__ == module.__name__}
        if declared != set(structs):
            print("%s has the structs %s, expected %s" % (path, sorted(declared), sorted(structs)))
            failed = 1
        lines = list(assertions(module, {name: struct for name, struct in structs.items() if name in declared}))
        with tempfile.TemporaryDirectory() as folder:
            source = os.path.join(folder, "structs.c")
            with open(source, "w") as file:
                file.write("#include <stddef.h>\n")
                file.writelines('#include "%s"\n' % header for header in ["fp8core/fp8core.h", *headers])
                file.writelines('_Static_assert(%s, "of %s");\n' % (line, os.path.basename(path)) for line in lines)
            includes = ["-I" + os.path.join(top, name, "include") for name in sorted(os.listdir(top))
                        if name.startswith("libfp8")]
            if subprocess.run([*compiler, "-std=c11", "-fsyntax-only", *includes, *options, source]).returncode:
                failed = 1
        print("%s: %d structs, %d statements" % (path, len(structs), len(lines)))
    sys.exit(failed)


main()
