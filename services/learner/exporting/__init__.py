"""A trained model as a Hugging Face directory, written from the pieces that a checkpoint has.

Guarantees: memory for a chunk of the weights and, where the files hold other tensors than the model, for one tensor; a
directory appears whole or not at all. Open `form` first.
"""
