"""The sizes of a language model that decide what a training step takes, read from its config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from dtensor_ring.lab.problem import text_entries
from dtensor_ring.lab.training.config_fields import check_config
from dtensor_ring.planning.mask import Mask

# Model types whose `sliding_window` is that of all layers, if no list says otherwise.
ALL_WINDOWED = ("mistral", "mixtral", "ministral", "phi3", "starcoder2")

# Activations of models whose MLP has two matrices; those of others have a gate besides.
WITHOUT_GATE = ("gelu", "gelu_new", "gelu_fast", "relu", "relu2")

# Beginnings of the names that configs of models with a state have.
STATEFUL = ("mamba", "ssm_", "state_size", "linear_num_", "linear_key_")

# Beginnings of model types whose queries and keys go through a norm.
QUERY_NORMS = ("qwen3", "gemma3", "olmo2", "olmo3", "exaone4", "apertus")

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


class StateShape(NamedTuple):
    """A gated delta rule in place of an attention (Yang et al., 2024, arXiv 2412.06464).

    Attributes:
        heads: number of heads of keys, which are as many as those of queries, and of values.
        head_dims: numbers of a head of keys, and of values.
    """

    heads: tuple[int, int]
    head_dims: tuple[int, int]

    @property
    def keys(self) -> int:
        """Numbers of a token of all keys."""
        return self.heads[0] * self.head_dims[0]

    @property
    def values(self) -> int:
        """Numbers of a token of all values."""
        return self.heads[1] * self.head_dims[1]


@dataclass(frozen=True)
class LayerShape:
    """A layer: one attention and one MLP.

    Attributes:
        mask: which keys a query sees.
        heads: number of query heads, and of key and value heads.
        head_dim: numbers of a head. Where those of keys and of values differ, their mean, which
            gives the same FLOPs and bytes.
        attention: products around the attention.
        mlp: products of the MLP; those of experts have `copies`.
        activated: numbers of a token that the activation function makes, over all active experts.
        routed: number of experts that a token is sent to; 0 without experts.
        has_query_norm: whether queries and keys go through a norm before the attention.
        has_gate: whether the output of the attention is multiplied by a gate.
        state: what stands in place of the attention; `None` for an attention. Then heads are 0.
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

    @property
    def products(self) -> tuple[Product, ...]:
        """All matrix products with weights."""
        return self.attention + self.mlp

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
    def of(cls, config: Any, *, with_states: bool = False) -> ModelShape:
        """Read a config of transformers.

        Args:
            with_states: whether layers with a gated delta rule are read, too.
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
        return _Reader(entries, with_states).model()

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
        """FLOPs by token of all products with weights in a forward, without attention itself."""
        return self.head.flops + sum(p.flops for x in self.layers for p in x.products)


class _Reader:
    """Reads the entries of a config, by the names that model types have for them."""

    def __init__(self, config: Mapping[str, Any], with_states: bool) -> None:
        self._config, self._with_states = config, with_states
        self.name = str(config.get("model_type") or "model")
        if not any(config.get(x) for x in ("num_attention_heads", "n_head")):
            raise ValueError(
                f"the config of {self.name} has no attention, so there is nothing to make parallel"
            )
        if "bert" in self.name:
            raise ValueError(f"{self.name} sees tokens ahead, and only next-token models are read")
        is_known = with_states and config.get("linear_num_value_heads") is not None
        if any(str(name).startswith(STATEFUL) for name in config) and not is_known:
            read = ": only those with a gated delta rule are counted" if with_states else ""
            raise ValueError(f"{self.name} has layers with a state, which are not simulated{read}")

    def model(self) -> ModelShape:
        self.hidden = self._size("hidden_size", "n_embd", "d_model")
        number = self._size("num_hidden_layers", "n_layer", "num_layers")
        return ModelShape(
            name=self.name,
            hidden=self.hidden,
            vocabulary=self._size("vocab_size"),
            tied=bool(self._config.get("tie_word_embeddings")),
            layers=tuple(self._layer(i, mask) for i, mask in enumerate(self._masks(number))),
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

    def _masks(self, number: int) -> Iterator[Mask | None]:
        """Yield the mask of each layer; `None` for one with a state."""
        for kind in self._kinds(number):
            match kind:
                case "full_attention":
                    yield Mask.causal()
                case "linear_attention" if self._with_states:
                    yield None
                case "sliding_attention":
                    # The window of transformers counts the query itself.
                    yield Mask.sliding(self._size("sliding_window") - 1)
                case "chunked_attention":
                    yield Mask.chunked(self._size("attention_chunk_size"))
                case _:
                    raise ValueError(
                        f"{self.name} has layers of kind {kind!r}, which are not simulated: only "
                        "full, sliding and chunked attention are"
                    )

    def _kinds(self, number: int) -> list[str]:
        """Return the kind of each layer."""
        kinds = self._config.get("layer_types")
        if kinds is not None:
            if len(kinds) < number:
                raise ValueError(f"{self.name} has {number} layers and {len(kinds)} layer_types")
            return list(kinds[:number])
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

    def _layer(self, index: int, mask: Mask | None) -> LayerShape:
        state = self._state() if mask is None else None
        heads, head_dim, attention = self._mixing(state)
        mlp, activated, routed = self._experts() if self._is_sparse(index) else self._dense()
        return LayerShape(
            Mask.causal() if mask is None else mask,
            *(heads, head_dim, attention, mlp, activated, routed),
            has_query_norm=state is None and self.name.startswith(QUERY_NORMS),
            has_gate=state is None and self.name.startswith(GATED_ATTENTION),
            state=state,
        )

    def _dense(self) -> tuple[tuple[Product, ...], int, int]:
        """Return products, activated numbers and active experts of a layer without experts."""
        names = "intermediate_size_mlp", "intermediate_size", "n_inner", "ffn_dim"
        size = self._size(*names, default=4 * self.hidden)
        return self._mlp(size), size, 0

    def _state(self) -> StateShape:
        """Return the gated delta rule of a layer."""
        keys, values = (self._size(f"linear_num_{x}_heads") for x in ("key", "value"))
        dims = self._size("linear_key_head_dim"), self._size("linear_value_head_dim")
        return StateShape((keys, values), dims)

    def _mixing(self, state: StateShape | None) -> tuple[tuple[int, int], int, tuple[Product, ...]]:
        """Return heads, their dim and the products around an attention, or around a state."""
        if state is not None:
            # Queries, keys, values and a gate of them; a rate and a decay of each value head.
            size = 2 * state.keys + 2 * state.values + 2 * state.heads[1]
            return (0, 0), 0, (Product(self.hidden, size), Product(state.values, self.hidden))
        return self._attention()

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
            Product(self.hidden, (heads + gates + 2 * key_heads) * dim),
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
        names = ("hidden_act", "hidden_activation", "activation_function")
        activation = next((x for x in map(self._config.get, names) if x), "silu")
        gated = activation not in WITHOUT_GATE and self.name != "starcoder2"
        into, out = (self.hidden, size), (size, self.hidden)
        return tuple(Product(*x, copies, active) for x in [into] * (1 + gated) + [out])

    def _is_sparse(self, index: int) -> bool:
        """Return whether a layer has experts."""
        if not self._num_experts():
            return False
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
        count, active = self._num_experts(), self._size("num_experts_per_tok", default=1)
        if not 0 < active <= count:
            raise ValueError(f"{self.name} sends a token to {active} experts, and has {count}")
        size = self._size("moe_intermediate_size", "intermediate_size")
        shared = self._shared(size)
        router = Product(self.hidden, count, divided=False)
        products = (router, *self._mlp(size, count, active), *(self._mlp(shared) if shared else ()))
        return products, size * active + shared, active

    def _shared(self, size: int) -> int:
        """Return the inner size of the experts that all tokens go through."""
        if self._config.get("shared_expert_intermediate_size"):
            return self._size("shared_expert_intermediate_size")
        if self.name.startswith("llama4"):
            return size
        return size * (self._config.get("n_shared_experts") or 0)
