#!/usr/bin/env python3
"""Writes a GGUF file again with every tensor read back to float32, metadata unchanged.

    tools/make_f32.py SOURCE.gguf TARGET.gguf

With quantised weights ggml rounds activations to 8 bits, which amplifies any difference in the order of additions; on
float32 weights two right implementations agree to a few thousandths, so that a wrong one shows.
"""

import os
import sys

import gguf
import numpy as np

# Written by GGUFWriter itself, or no longer true once the weights are float32.
LEFT_OUT = ("general.architecture", "general.file_type", "general.quantization_version")


def read_back(source, target):
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key in LEFT_OUT:
            continue
        is_array = field.types[0] == gguf.GGUFValueType.ARRAY
        writer.add_key_value(key, field.contents(), field.types[0], field.types[-1] if is_array else None)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main():
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    source, target = sys.argv[1:]
    part = target + ".part"  # a cut-off run leaves nothing that looks finished
    read_back(source, part)
    os.replace(part, target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
