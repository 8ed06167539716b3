"""The towers of Baidu: ``ernie4_5_vl`` and ``paddleocr_vl``.

``frame_pairs`` finds the patches of two frames that make one token of ERNIE.
"""
