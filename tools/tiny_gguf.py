"""What the makers of small test models share: a byte-level vocabulary and a writer."""

import os

import gguf

END = 256  # the token after the 256 bytes, a control token


def byte_letters():
    """The printable letter that byte-level BPE writes for each byte (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        letters.setdefault(byte, chr(256 + byte - sum(p < byte for p in printable)))
    return letters


def add_byte_vocabulary(writer, size, template):
    """One token a byte, then END, then control tokens without a use up to `size`."""
    letters = byte_letters()
    tokens = [letters[byte] for byte in range(256)] + ["<|end|>"]
    tokens += [f"<|unused{i}|>" for i in range(size - len(tokens))]
    kinds = [gguf.TokenType.NORMAL] * 256 + [gguf.TokenType.CONTROL] * (size - 256)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([f"{letters[0]} {letters[0]}"])  # libllama wants a list; this pair is never text
    writer.add_bos_token_id(END)
    writer.add_eos_token_id(END)
    writer.add_add_bos_token(False)
    writer.add_chat_template(template)


def write(path, architecture, fill):
    """Writes a file by `fill(writer)`; a cut-off run leaves nothing that looks finished."""
    part = path + ".part"
    writer = gguf.GGUFWriter(part, architecture)
    fill(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(part, path)
