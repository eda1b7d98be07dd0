"""Names and what they mean. Needs nothing, so that a config can be read, and arms listed, without torch."""

ALIASES = {"oelm_v2": "oelm", "oelm_random": "oelm-random"}  # the study's own spellings of the arms
# Kinds of frames (see frames.py).
KINDS = {
    "headwise": "one QR per head: every head its own orthonormal frame",
    "global": "one orthogonal matrix over all heads",
    "gaussian": "normal entries of std gain/sqrt(d), scale-matched to the orthonormal frames",
    "normal": "normal entries of std 0.02 * gain, the usual initialisation",
    "identity": "head h reads its own head_dim coordinates of the input (shifted by `offset`)",
    "tied": "the key's frame equals its query's headwise frame",
    "keep": "leave the weight as built or pretrained",
}
