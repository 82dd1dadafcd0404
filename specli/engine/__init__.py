"""The only room that knows llama.cpp, and the shipped fake that behaves like it."""
