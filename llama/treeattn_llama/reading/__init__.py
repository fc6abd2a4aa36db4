"""Reading checkpoints: a file or a directory in, a `Checkpoint` and its `Tokenizer` out.

files:          where a model lies, and which of the two formats it has: `open_checkpoint`
gguf_file:      a GGUF file's tensors and configuration
gguf_tokenizer: the tokenizer of a GGUF file's metadata
hugging_face:   a Hugging Face directory's tensors and configuration
checkpoint:     what both give: a configuration, a tokenizer, and tensors by Hugging Face's names
config:         the numbers that define a Llama
tokenizer:      text to token ids and back; the tokenizer of a directory; chat templates
guard:          whatever goes wrong while reading a stranger's file is a ValueError
"""
