"""Examples.

    pretrain.py    the main one: `python -m examples.pretrain` trains a small BERT four times and compares
    settings.py    what is trained: model sizes, schedule, the start that all trainings share
    text.py        the text, and batches of masked bytes
    bert_jax.py    BERT and its training in JAX
    bert_keras.py  BERT and its training in Keras on TensorFlow
    train.py       one training, in a process of its own: progress, checkpoints, measurements
    checkpoint.py  checkpoints that a kill cannot spoil
    report.py      the table, the verdict on the curves and the picture
"""
