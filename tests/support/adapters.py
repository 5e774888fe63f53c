"""Models with adapters as plain ones."""

from torch import nn

from heterorl.common.model.adapters import LoraLinear


def merged(layer):
    """A plain layer of W + (alpha / rank) B A, summed in fp32."""
    plain = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
    plain.weight = nn.Parameter(layer.merged_weight(layer.weight.detach()).to(layer.weight.dtype))
    plain.bias = layer.bias
    return plain


def merge(model):
    """Replace adapters by equal plain layers, up to rounding; in place."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, LoraLinear):
                setattr(parent, name, merged(child))
