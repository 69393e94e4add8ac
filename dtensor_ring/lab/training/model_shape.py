"""The sizes of a language model that decide what a training step takes, read from its config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from dtensor_ring.lab.problem import text_entries
from dtensor_ring.lab.training.config_fields import check_config
from dtensor_ring.lab.training.state_shape import StateShape
from dtensor_ring.planning.mask import Mask

# Model types whose `sliding_window` is that of all layers, if no list says otherwise.
ALL_WINDOWED = ("mistral", "mixtral", "ministral", "phi3", "starcoder2")

# Activations of models whose MLP has two matrices; those of others have a gate besides.
WITHOUT_GATE = ("gelu", "gelu_new", "gelu_fast", "relu", "relu2")

# Beginnings of the names that configs of models with a state have.
STATEFUL = ("mamba", "ssm_", "state_size", "linear_num_", "linear_key_", "linear_attn_")

# What layers have in the place of an attention, by the names of configs.
WITH_STATE = ("linear_attention", "mamba", "conv", "hybrid")

# Layers that are an MLP alone, and models in which all layers have an MLP or something else.
MLPS, APART = ("mlp", "moe"), ("nemotron_h",)

# Beginnings of model types whose queries and keys go through a norm.
QUERY_NORMS = ("qwen3", "gemma3", "olmo2", "olmo3", "olmo_h", "exaone4", "apertus", "lfm2")

# Beginnings of model types whose attention multiplies its output by a gate of its input.
GATED_ATTENTION = ("qwen3_next", "qwen3_5")


class Product(NamedTuple):
    """A matrix product of all tokens with weights.

    Attributes:
        inputs: numbers of a token that go in.
        outputs: numbers of a token that come out.
        copies: number of matrices of this shape, such as the experts of a layer.
        active: number of them that a token goes through.
        divided: whether tensor parallelism divides it; else each rank computes it for its tokens.
    """

    inputs: int
    outputs: int
    copies: int = 1
    active: int = 1
    divided: bool = True

    @property
    def weights(self) -> int:
        """Numbers of all matrices."""
        return self.inputs * self.outputs * self.copies

    @property
    def flops(self) -> int:
        """FLOPs of a forward by token."""
        return 2 * self.inputs * self.outputs * self.active


@dataclass(frozen=True)
class LayerShape:
    """A layer: an attention or a state or both, and an MLP; or one of them alone.

    Attributes:
        mask: which keys a query sees.
        heads: number of query heads, and of key and value heads; 0 without an attention.
        head_dim: numbers of a head. Where those of keys and of values differ, their mean, which
            gives the same FLOPs and bytes.
        attention: products around the state and the attention. The last one of each comes after it;
            before an attention are those of queries, with their gate, of keys and of values.
        mlp: products of the MLP; those of experts have `copies`.
        activated: numbers of a token that the activation function makes, over all active experts.
        routed: number of experts that a token is sent to; 0 without experts.
        has_query_norm: whether queries and keys go through a norm before the attention.
        has_gate: whether the output of the attention is multiplied by a gate.
        state: what stands in place of the attention, or beside it; `None` for an attention alone.
        state_products: how many of the products around them are those of the state, the first ones.
    """

    mask: Mask
    heads: tuple[int, int]
    head_dim: int
    attention: tuple[Product, ...]
    mlp: tuple[Product, ...]
    activated: int
    routed: int = 0
    has_query_norm: bool = False
    has_gate: bool = False
    state: StateShape | None = None
    state_products: int = 0

    @property
    def products(self) -> tuple[Product, ...]:
        """All matrix products with weights."""
        return self.attention + self.mlp

    @property
    def num_blocks(self) -> int:
        """How many times the layer adds to its input: a norm precedes each."""
        return bool(self.attention) + bool(self.mlp)

    @property
    def weights(self) -> int:
        """Numbers of all matrices."""
        return sum(x.weights for x in self.products)


@dataclass(frozen=True)
class ModelShape:
    """A language model that predicts next tokens, in sizes.

    Vectors, such as biases and the weights of norms, are left out: they are less than 0.1 % of a
    model of any use.

    Attributes:
        name: what reports call it.
        hidden: numbers of a token between layers.
        vocabulary: number of tokens that there are.
        tied: whether the embedding is the output projection.
        layers: from the first to the last.
    """

    name: str
    hidden: int
    vocabulary: int
    tied: bool
    layers: tuple[LayerShape, ...]

    @classmethod
    def of(cls, config: Any) -> ModelShape:
        """Read a config of transformers.

        Args:
            config: a mapping with the names of `config.json`, the path of such a file or of its
                folder, or an object with `to_dict`. What a file leaves out as it is the default
                has to be given: a config of transformers has it all.

        Raises:
            TypeError: if it is something else.
            ValueError: if there is no such file, it lacks a size, a size is out of range, or a
                layer is of a kind that is not simulated.

        >>> config = dict(hidden_size=64, num_attention_heads=4, num_hidden_layers=2)
        >>> config |= dict(intermediate_size=96, vocab_size=32, model_type="llama")
        >>> ModelShape.of(config).layers[1].heads
        (4, 4)
        """
        entries = text_entries(config)
        check_config(entries)
        return _Reader(entries).model()

    @property
    def weights(self) -> int:
        """Numbers of all matrices, embeddings included."""
        return sum(x.weights for x in self.layers) + self.embedded * (1 if self.tied else 2)

    @property
    def embedded(self) -> int:
        """Numbers of the embedding, and of the output projection."""
        return self.hidden * self.vocabulary

    @property
    def head(self) -> Product:
        """The output projection."""
        return Product(self.hidden, self.vocabulary)

    @property
    def flops(self) -> int:
        """FLOPs by token of all products and states in a forward, without attention itself."""
        states = sum(x.state.flops(is_sharded=False) for x in self.layers if x.state)
        return self.head.flops + sum(p.flops for x in self.layers for p in x.products) + states


class _Reader:
    """Reads the entries of a config, by the names that model types have for them."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self.name = str(config.get("model_type") or "model")
        if not any(config.get(x) for x in ("num_attention_heads", "n_head")):
            raise ValueError(
                f"the config of {self.name} has no attention, so there is nothing to make parallel"
            )
        if "bert" in self.name:
            raise ValueError(f"{self.name} sees tokens ahead, and only next-token models are read")

    def model(self) -> ModelShape:
        self.hidden = self._size("hidden_size", "n_embd", "d_model")
        return ModelShape(
            name=self.name,
            hidden=self.hidden,
            vocabulary=self._size("vocab_size"),
            tied=bool(self._config.get("tie_word_embeddings")),
            layers=tuple(self._layer(i, kind) for i, kind in enumerate(self._kinds())),
        )

    def _size(self, *names: str, default: int | None = None) -> int:
        """Return the first entry of these names.

        Raises:
            ValueError: if no name has an entry, or the entry is a list with one value per layer.
        """
        found = next((x for x in map(self._config.get, names) if x is not None), default)
        if found is None:
            raise ValueError(f"the config of {self.name} lacks {names[0]}")
        if not isinstance(found, int):
            raise ValueError(f"{names[0]} of {self.name} differs by layer, which is not simulated")
        return found

    def _mask(self, kind: str) -> Mask:
        """Return the mask of a layer of a kind."""
        match kind:
            case "sliding_attention":
                # The window of transformers counts the query itself.
                return Mask.sliding(self._size("sliding_window") - 1)
            case "chunked_attention":
                return Mask.chunked(self._size("attention_chunk_size"))
        if kind in ("full_attention", "attention", *WITH_STATE, *MLPS):
            return Mask.causal()
        raise ValueError(
            f"{self.name} has layers of kind {kind!r}, which are not simulated: only full, sliding "
            "and chunked attention, and layers with a state, are"
        )

    def _kinds(self) -> list[str]:
        """Return the kind of each layer."""
        kinds = self._config.get("layer_types") or self._config.get("layers_block_type")
        number = self._size("num_hidden_layers", "n_layer", "num_layers", default=len(kinds or ()))
        if kinds is not None:
            if len(kinds) < number:
                raise ValueError(f"{self.name} has {number} layers and {len(kinds)} layer_types")
            return list(kinds[:number])
        if any(str(name).startswith(STATEFUL) for name in self._config):
            return self._unlisted(number)
        if not self._config.get("sliding_window") or not self._config.get(
            "use_sliding_window", True
        ):
            return ["full_attention"] * number
        if self._config.get("sliding_window_pattern"):
            # Every so many layers, one sees all tokens.
            every = self._size("sliding_window_pattern")
            return [
                "sliding_attention" if (i + 1) % every else "full_attention" for i in range(number)
            ]
        if self.name not in ALL_WINDOWED:
            raise ValueError(
                f"the config of {self.name} has a sliding_window, and no layer_types which say "
                "which layers have it; the config object of transformers has them"
            )
        return ["sliding_attention"] * number

    def _unlisted(self, number: int) -> list[str]:
        """Return the kind of each layer of a model with states that has no list of them."""
        if self.name == "falcon_h1":
            return ["hybrid"] * number
        attention = self._config.get("attn_layer_indices")
        if attention is None:
            raise ValueError(self._why_no_state())
        return ["full_attention" if i in attention else "mamba" for i in range(number)]

    def _why_no_state(self) -> str:
        return (
            f"{self.name} has layers with a state, which are not simulated: only gated and Kimi "
            "delta rules, Mamba 2 and convolutions are"
        )

    def _layer(self, index: int, kind: str) -> LayerShape:
        mask, state, mixing = self._mask(kind), None, tuple[Product, ...]()
        heads, head_dim = (0, 0), 0
        mlp: tuple[tuple[Product, ...], int, int] = (), 0, 0
        if kind in WITH_STATE:
            state, mixing = self._state()
        of_state = len(mixing)
        if kind not in (*WITH_STATE, *MLPS) or kind == "hybrid":
            heads, head_dim, around = self._attention()
            mixing = *mixing, *around
        if kind in MLPS or self.name not in APART:
            mlp = self._experts() if self._is_sparse(index, kind) else self._dense()
        return LayerShape(
            *(mask, heads, head_dim, mixing, *mlp),
            has_query_norm=heads[0] > 0 and self.name.startswith(QUERY_NORMS),
            has_gate=heads[0] > 0 and self.name.startswith(GATED_ATTENTION),
            state=state,
            state_products=of_state,
        )

    def _dense(self) -> tuple[tuple[Product, ...], int, int]:
        """Return products, activated numbers and active experts of a layer without experts."""
        names = "shared_intermediate_size", "intermediate_size_mlp", "intermediate_size", "n_inner"
        size = self._size(*names, "ffn_dim", default=4 * self.hidden)
        if self._config.get("block_auto_adjust_ff_dim"):
            size = int((self._config.get("block_ffn_dim_multiplier") or 1) * (2 * size // 3))
            multiple = self._size("block_multiple_of", default=1)
            size = -(-size // multiple) * multiple
        return self._mlp(size), size, 0

    def _state(self) -> tuple[StateShape, tuple[Product, ...]]:
        """Return the state of a layer, and the products around it."""
        names = "linear_conv_kernel_dim", "mamba_d_conv", "conv_kernel", "conv_L_cache"
        reach = self._size(*names, default=4) - 1
        if self._config.get("linear_num_value_heads"):
            return self._delta_rule(reach)
        if self._config.get("linear_num_heads"):
            return self._kimi_rule(reach)
        if self._config.get("mamba_n_heads") or self._config.get("mamba_num_heads"):
            return self._mamba2(reach)
        if not self._config.get("conv_L_cache"):
            raise ValueError(self._why_no_state())
        state = StateShape(self.hidden, reach, 2 * self.hidden)
        return state, (Product(self.hidden, 3 * self.hidden), Product(self.hidden, self.hidden))

    def _delta_rule(self, reach: int) -> tuple[StateShape, tuple[Product, ...]]:
        groups, heads = (self._size(f"linear_num_{x}_heads") for x in ("key", "value"))
        dims = self._size("linear_key_head_dim"), self._size("linear_value_head_dim")
        keys, values = groups * dims[0], heads * dims[1]
        state = StateShape(2 * keys + values, reach, values, groups, heads, dims, True)
        # Queries, keys, values and a gate of them; a rate and a decay of each value head.
        into = Product(self.hidden, state.channels + values + 2 * heads)
        return state, (into, Product(values, self.hidden))

    def _kimi_rule(self, reach: int) -> tuple[StateShape, tuple[Product, ...]]:
        heads, dim = self._size("linear_num_heads"), self._size("linear_head_dim")
        values = heads * dim
        state = StateShape(3 * values, reach, values, heads, heads, (dim, dim), True)
        # Decays and gates are products of low rank.
        low = Product(self.hidden, dim, divided=False), Product(dim, values)
        into = Product(self.hidden, 3 * values + heads)
        return state, (into, *low, *low, Product(values, self.hidden))

    def _mamba2(self, reach: int) -> tuple[StateShape, tuple[Product, ...]]:
        heads = self._size("mamba_n_heads", "mamba_num_heads")
        groups = self._size("mamba_n_groups", "n_groups")
        key = self._size("mamba_d_state", "ssm_state_size")
        given = [self._config.get(x) for x in ("mamba_head_dim", "mamba_d_head")]
        inner = self._size(
            "mamba_d_ssm", default=self._size("mamba_expand", default=2) * self.hidden
        )
        # It may be "auto".
        dim = next((x for x in given if isinstance(x, int)), inner // heads)
        values, chunk = heads * dim, self._size("mamba_chunk_size", "chunk_size", default=256)
        channels = values + 2 * groups * key
        state = StateShape(channels, reach, values, groups, heads, (key, dim), False, chunk)
        return state, (
            Product(self.hidden, channels + values + heads),
            Product(values, self.hidden),
        )

    def _attention(self) -> tuple[tuple[int, int], int, tuple[Product, ...]]:
        """Return heads, their dim, and the products around an attention."""
        heads = self._size("num_attention_heads", "n_head")
        if self._config.get("kv_lora_rank"):
            return self._latent(heads)
        key_heads = self._size("num_key_value_heads", default=heads)
        if heads % key_heads:
            raise ValueError(
                f"{heads} heads of queries of {self.name} are no multiple of its {key_heads} of "
                "keys"
            )
        if not self._config.get("head_dim") and self.hidden % heads:
            raise ValueError(
                f"hidden_size {self.hidden} of {self.name} is no multiple of its {heads} heads, so "
                "the config needs a head_dim"
            )
        dim = self._size("head_dim", default=self.hidden // heads)
        gates = heads if self.name.startswith(GATED_ATTENTION) else 0
        products = (
            Product(self.hidden, (heads + gates) * dim),
            *[Product(self.hidden, key_heads * dim)] * 2,
            Product(heads * dim, self.hidden),
        )
        return (heads, key_heads), dim, products

    def _latent(self, heads: int) -> tuple[tuple[int, int], int, tuple[Product, ...]]:
        """Return the same of multi-head latent attention (DeepSeek-AI, 2024, arXiv 2405.04434)."""
        rank, rotary = self._size("kv_lora_rank"), self._size("qk_rope_head_dim")
        plain, value = self._size("qk_nope_head_dim"), self._size("v_head_dim")
        query = self.hidden
        products = [Product(self.hidden, rank + rotary, divided=False)]
        if self._config.get("q_lora_rank"):
            query = self._size("q_lora_rank")
            products.append(Product(self.hidden, query, divided=False))
        products += [
            Product(query, heads * (plain + rotary)),
            Product(rank, heads * (plain + value)),
            Product(heads * value, self.hidden),
        ]
        return (heads, heads), (plain + rotary + value) // 2, tuple(products)

    def _mlp(self, size: int, copies: int = 1, active: int = 1) -> tuple[Product, ...]:
        """Return the products of MLPs with `size` numbers of a token inside."""
        names = ("mlp_hidden_act", "hidden_act", "hidden_activation", "activation_function")
        activation = next((x for x in map(self._config.get, names) if x), "silu")
        gated = activation not in WITHOUT_GATE and self.name != "starcoder2"
        into, out = (self.hidden, size), (size, self.hidden)
        return tuple(Product(*x, copies, active) for x in [into] * (1 + gated) + [out])

    def _is_sparse(self, index: int, kind: str) -> bool:
        """Return whether a layer has experts."""
        if not self._num_experts() or kind == "mlp":
            return False
        if self._config.get("mlp_layer_types"):
            return self._config["mlp_layer_types"][index] == "sparse"
        if "moe_layers" in self._config and self._config["moe_layers"] is not None:
            return index in self._config["moe_layers"]
        dense_first = self._config.get("first_k_dense_replace") or 0
        every = self._config.get("decoder_sparse_step") or 1
        dense = self._config.get("mlp_only_layers") or ()
        return index >= dense_first and (index + 1) % every == 0 and index not in dense

    def _num_experts(self) -> int:
        names = ("num_local_experts", "n_routed_experts", "num_experts")
        found = any(self._config.get(name) for name in names)
        return self._size(*names) if found else 0

    def _experts(self) -> tuple[tuple[Product, ...], int, int]:
        """Return products, activated numbers and active experts of a layer with experts."""
        names = "num_experts_per_tok", "num_experts_per_token"
        count, active = self._num_experts(), self._size(*names, default=1)
        if not 0 < active <= count:
            raise ValueError(f"{self.name} sends a token to {active} experts, and has {count}")
        if self._config.get("moe_latent_size"):
            raise ValueError(f"{self.name} has experts of latents, which are not simulated")
        size = self._size("moe_intermediate_size", "intermediate_size")
        shared = self._shared(size)
        router = Product(self.hidden, count, divided=False)
        products = (router, *self._mlp(size, count, active), *(self._mlp(shared) if shared else ()))
        return products, size * active + shared, active

    def _shared(self, size: int) -> int:
        """Return the inner size of the experts that all tokens go through."""
        names = "shared_expert", "shared", "moe_shared_expert"
        found = [x for x in names if self._config.get(f"{x}_intermediate_size")]
        if found:
            return self._size(f"{found[0]}_intermediate_size")
        if self.name.startswith("llama4"):
            return size
        return size * self._size("n_shared_experts", "num_shared_experts", default=0)
