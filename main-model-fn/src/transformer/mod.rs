//! The model's non-expert modules in LibTorch.
//!
//! One call of [`Transformer::forward`] takes the rows of all sequences of an iteration through
//! all layers: projections, norms and routers see them as one matrix, attention goes sequence by
//! sequence, experts are the business of [`crate::experts`].

mod attention;
mod cache;
mod error;
mod gqa;
mod heads;
mod host;
mod linear;
mod load;
mod mla;
mod mlp;
mod norm;
mod rope;

pub(crate) use cache::SequenceCache;
pub(crate) use error::{ForwardError, LoadModelError};

use crate::engine::request::{InspectLevel, LayerRouting};
use crate::experts::{Experts, LayerCall, Routed, route};
use attention::{Attention, Span};
use cache::CacheShape;
use linear::Linear;
use mlp::{GatedMlp, SharedExperts};
use norm::RmsNorm;
use remoe_kernels::Dtype;
use remoe_model::RoutingFacts;
use rope::Rope;
use tch::{Device, Kind, TchError, Tensor};

/// The model's weights outside of its routed experts, on the device.
pub(crate) struct Transformer {
    device: Device,
    dtype: Dtype,
    kind: Kind,
    hidden: usize,
    embedding: Tensor,
    layers: Vec<Layer>,
    cache_shapes: Vec<CacheShape>,
    rope: Rope,
    norm: RmsNorm,
    head: Linear,
}

struct Layer {
    before_attention: RmsNorm,
    attention: Attention,
    before_mlp: RmsNorm,
    mlp: Mlp,
}

enum Mlp {
    Dense(GatedMlp),
    Moe(Box<Moe>),
}

struct Moe {
    router: Linear,
    routing: RoutingFacts,
    experts: usize,
    top_k: usize,
    shared: Option<SharedExperts>,
}

/// Some rows of one sequence.
pub(crate) struct Segment<'a> {
    /// The tokens to forward; their positions follow the cache's.
    pub(crate) tokens: &'a [u32],
    pub(crate) cache: &'a mut SequenceCache,
    /// Which rows' logits are wanted.
    pub(crate) logits: Wanted,
}

/// Rows of a segment whose logits are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wanted {
    None,
    Last,
    All,
}

/// What one iteration gives.
pub(crate) struct Output {
    /// The wanted rows' logits, one after the other, `vocab` each.
    pub(crate) logits: Vec<f32>,
    /// Entries per row of logits.
    pub(crate) vocab: usize,
    /// Routing and final hidden states of all rows, when asked for.
    pub(crate) trace: Option<Trace>,
}

/// What an inspection sees of an iteration's rows.
#[derive(Default)]
pub(crate) struct Trace {
    pub(crate) routing: Vec<LayerRouting>,
    /// rows x hidden, before the final norm, compute dtype, little endian; empty unless asked for.
    pub(crate) hidden: Vec<u8>,
}

impl Transformer {
    pub(crate) fn new_cache(&self) -> Result<SequenceCache, TchError> {
        SequenceCache::new(&self.cache_shapes, self.kind, self.device)
    }

    /// Forwards every segment's tokens and extends its cache by them.
    ///
    /// # Errors
    /// LibTorch refuses, or experts are out of reach. The caches are as long as before: the same
    /// tokens can be forwarded again, over what was written of them.
    pub(crate) fn forward(
        &self,
        segments: &mut [Segment<'_>],
        experts: &mut Experts,
        trace: Option<InspectLevel>,
    ) -> Result<Output, ForwardError> {
        let mut tokens = Vec::new();
        let mut positions = Vec::new();
        let mut wanted = Vec::new();
        let mut spans = Vec::with_capacity(segments.len());
        for segment in segments {
            let (first, rows) = (tokens.len() as i64, segment.tokens.len() as i64);
            tokens.extend(segment.tokens.iter().copied().map(i64::from));
            positions.extend((0..rows).map(|row| segment.cache.length() + row));
            match segment.logits {
                Wanted::None => (),
                Wanted::Last => wanted.push(first + rows - 1),
                Wanted::All => wanted.extend(first..first + rows),
            }
            spans.push(Span { first, rows, cache: segment.cache });
        }
        let hidden = trace == Some(InspectLevel::Hidden);
        let mut trace = trace.map(|_| Trace::default());
        experts.begin_iteration(tokens.len());
        let x = self.layers_forward(&tokens, &positions, &mut spans, experts, trace.as_mut())?;
        if let Some(trace) = trace.as_mut().filter(|_| hidden) {
            trace.hidden = host::bytes(&x)?;
        }
        let (logits, vocab) = self.logits(&x, &wanted)?;
        // Nothing can fail any more.
        for span in &mut spans {
            span.cache.advance(span.rows);
        }
        Ok(Output { logits, vocab, trace })
    }

    fn layers_forward(
        &self,
        tokens: &[i64],
        positions: &[i64],
        spans: &mut [Span<'_>],
        experts: &mut Experts,
        mut trace: Option<&mut Trace>,
    ) -> Result<Tensor, ForwardError> {
        let tokens = Tensor::f_from_slice(tokens)?.f_to_device(self.device)?;
        let angles = self.rope.angles(positions, self.kind)?;
        let mut x = self.embedding.f_index_select(0, &tokens)?;
        for (id, layer) in self.layers.iter().enumerate() {
            let normed = layer.before_attention.forward(&x)?;
            x = x.f_add(&layer.attention.forward(id, &normed, &angles, spans)?)?;
            let normed = layer.before_mlp.forward(&x)?;
            let output = match &layer.mlp {
                Mlp::Dense(mlp) => mlp.forward(&normed)?,
                Mlp::Moe(moe) => self.moe_forward(id, moe, &normed, experts, trace.as_deref_mut())?,
            };
            x = x.f_add(&output)?;
        }
        Ok(x)
    }

    fn moe_forward(
        &self,
        layer: usize,
        moe: &Moe,
        x: &Tensor,
        experts: &mut Experts,
        trace: Option<&mut Trace>,
    ) -> Result<Tensor, ForwardError> {
        let logits = host::floats(&moe.router.forward(x)?)?;
        let inputs = host::bytes(x)?;
        let routed = route(&logits, moe.experts, moe.top_k, &moe.routing, self.dtype);
        if let Some(trace) = trace {
            trace.routing.push(recorded(layer, &routed));
        }
        let call = LayerCall { layer, inputs: &inputs, routed: &routed };
        let mut output = vec![0; inputs.len()];
        let shared = || -> Result<_, ForwardError> {
            match &moe.shared {
                None => Ok(None),
                Some(shared) => Ok(Some(host::bytes(&shared.forward(x)?)?)),
            }
        };
        experts.forward(&call, shared, &mut output)?;
        Ok(Tensor::f_from_data_size(&output, &x.size(), self.kind)?.f_to_device(self.device)?)
    }

    fn logits(&self, x: &Tensor, wanted: &[i64]) -> Result<(Vec<f32>, usize), ForwardError> {
        let vocab = self.head.weight.outputs() as usize;
        if wanted.is_empty() {
            return Ok((Vec::new(), vocab));
        }
        let rows = Tensor::f_from_slice(wanted)?.f_to_device(self.device)?;
        let normed = self.norm.forward(&x.f_index_select(0, &rows)?)?;
        Ok((host::floats(&self.head.forward(&normed)?)?, vocab))
    }

    /// Elements of a hidden state.
    pub(crate) fn hidden(&self) -> usize {
        self.hidden
    }
}

fn recorded(layer: usize, routed: &Routed) -> LayerRouting {
    LayerRouting { layer, tokens: (0..routed.tokens()).map(|token| routed.of(token).collect()).collect() }
}
