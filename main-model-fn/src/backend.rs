//! The seam between a model and what computes it.
//!
//! Blocks and families are written once, above a [`Backend`]: one set of operations on one device. Two stand below
//! it: [`crate::Native`], the kernels' own operations on the CPU, and LibTorch's, a crate and a program of their own.
//! Each rounds in its own places, so that answers are the same bits within a set of operations and close between
//! them.

use crate::DeviceName;
use crate::routing::{Routed, RoutingRule};
use remoe_kernels::{AttentionShape, CacheFormat, Dtype, KernelError, NumericsClass, Pool};
use remoe_model::{
    Activation, Checkpoint, CheckpointError, MlaFacts, MlpTensors, NormKind, RopeFacts, TensorRef,
};
use remoe_weights::LoadError;
use std::borrow::Cow;
use std::sync::Arc;

/// Positions whose keys and values lie together; what sequences hold and share.
pub use remoe_kernels::PAGE_POSITIONS;

/// Why an operation was not computed.
#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    /// The kernels refused.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// Weights that are read when they are needed cannot be read.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The library that drives the device did.
    #[error("{library}: {message}")]
    Library {
        /// Name of the library.
        library: &'static str,
        /// Message of the library.
        message: String,
    },
    /// The device has no room for a result.
    #[error("out of device memory: {message}")]
    OutOfMemory {
        /// Message of the library.
        message: String,
    },
    /// The device does not answer any more: every further operation fails.
    #[error("device lost: {message}")]
    DeviceLost {
        /// Message of the library.
        message: String,
    },
    /// Operands do not fit each other: a fault of this program.
    #[error("{what}: expected {expected}, got {actual}")]
    Shape {
        /// Operation or operand that does not fit.
        what: &'static str,
        /// Size or index that was given.
        actual: usize,
        /// Size that the other operands call for.
        expected: usize,
    },
}

/// Why the weights could not be brought to the device.
#[derive(Debug, thiserror::Error)]
pub enum LoadModelError {
    /// The checkpoint cannot be read.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// Weights cannot be packed.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// Dense layers or shared experts cannot be read or packed.
    #[error(transparent)]
    Gated(#[from] LoadError),
    /// The device does not take them.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// A thread that loads layers ended abnormally.
    #[error("a thread that loads layers panicked")]
    Panicked,
    /// The checkpoint's facts contradict each other: a fault of this program.
    #[error("inconsistent checkpoint facts: {0}")]
    Inconsistent(&'static str),
}

/// Weights that answers can do without for a while.
pub trait DeferredWeights: Send + Sync {
    /// Bytes of memory that it is going to take; 0 once it is there.
    fn missing_bytes(&self) -> usize;

    /// Reads it, unless it is there.
    ///
    /// # Errors
    /// The checkpoint cannot be read.
    fn read(&self) -> Result<(), CheckpointError>;
}

/// Place of a page in a page table that a sequence has let go of: no row sees its positions any more.
pub const RELEASED: usize = usize::MAX;

/// A layer and where its keys and values are.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PagedLayer {
    /// How it attends.
    pub shape: AttentionShape,
    /// Page table of a sequence whose pages hold the layer, beside others with the same table.
    pub table: usize,
}

/// The rows of one sequence in an iteration.
#[derive(Debug, Clone)]
pub struct Span {
    /// The first of them among all rows.
    pub first: usize,
    /// How many they are.
    pub rows: usize,
    /// Positions of the sequence before them.
    pub past: usize,
    /// The page tables of its positions, those of the rows included ([`PagedLayer::table`]).
    pub tables: Vec<Vec<usize>>,
}

impl Span {
    /// Pages of the table `table` in the order of their positions.
    pub fn table(&self, table: usize) -> &[usize] {
        self.tables.get(table).map_or(&[], Vec::as_slice)
    }
}

/// A matrix product's weights, outputs x inputs, or a norm's, and what is added to the results.
#[derive(Clone, Copy, Debug)]
pub struct Affine<'a> {
    /// The weights.
    pub weight: &'a TensorRef,
    /// One element per output.
    pub bias: Option<&'a TensorRef>,
}

/// The router of one layer.
pub struct Router<B: Backend> {
    /// From rows to a logit for each expert.
    pub linear: B::Linear,
    /// How experts are selected by them.
    pub rule: RoutingRule,
    /// The rule's correction on the device.
    pub correction: Option<B::Vector>,
}

impl<B: Backend> Router<B> {
    /// Bytes of its weights.
    pub(crate) fn bytes(&self) -> usize {
        self.linear.bytes() + size_of_val(&self.rule.correction[..])
    }
}

/// Part of the model that stays in memory as long as the model does.
pub trait ResidentPart {
    /// Bytes of it, on whatever device.
    fn bytes(&self) -> usize;
}

/// A set of operations on a device. Tensors are matrices of rows in the compute dtype unless said otherwise.
pub trait Backend: Sized + Send + Sync + 'static {
    /// Name of the backend in functions and descriptions.
    const NAME: &'static str;
    /// Rows on the device.
    type Tensor: Send;
    /// A table of rows.
    type Embedding: Send + ResidentPart;
    /// Weights of a product.
    type Linear: Send + ResidentPart;
    /// Weights of a norm.
    type Norm: Send + ResidentPart;
    /// Weights of a gated network.
    type Gated: Send + ResidentPart;
    /// The up-projections of latent attention.
    type Heads: Send + ResidentPart;
    /// Frequencies of a rotary embedding.
    type Rope: Send;
    /// Cosines and sines of an iteration's rows.
    type Angles: Send;
    /// A few numbers that operations take, in float32.
    type Vector: Send;
    /// Keys and values of every layer, page by page.
    type Pages: Send;
    /// The spans of an iteration, and what attention of every layer needs to know of them.
    type Spans: Send;

    /// True if what shared experts add stays on the device: it is added there, rounded once more, and the host waits for
    /// routed experts alone.
    const ADDS_SHARED: bool = false;

    /// True if the largest logits are selected on the device, so that the others need not come to the host.
    const SELECTS_LOGITS: bool = false;

    /// The set of operations on `device`, or on the best one there is.
    ///
    /// # Errors
    /// The device is not there.
    fn open(device: Option<DeviceName>, dtype: Dtype, pool: &Arc<Pool>) -> Result<Self, crate::DeviceError>;

    /// The device that computes.
    fn device(&self) -> DeviceName;

    /// Sets the form of keys and values in pages that are made later. False where only the compute dtype is supported.
    fn set_cache_format(&mut self, format: CacheFormat) -> bool {
        format == CacheFormat::Plain
    }

    /// Form of keys and values in pages.
    fn cache_format(&self) -> CacheFormat {
        CacheFormat::Plain
    }

    /// Called on the thread that computes, before everything else.
    fn enter_thread(&self) {}

    /// Tells which layer the operations that follow are for, if any. For counts.
    fn enter_layer(&self, _layer: Option<usize>) {}

    /// A table of rows, kept in the compute dtype or as `class` says. What is looked up is in the compute dtype.
    ///
    /// # Errors
    /// The checkpoint cannot be read, or the device has no room; the same for everything that is loaded.
    fn load_embedding(
        &self,
        checkpoint: &Arc<Checkpoint>,
        table: &TensorRef,
        class: NumericsClass,
    ) -> Result<Self::Embedding, LoadModelError>;

    /// Returns the part of `table` that is still to be read; until then its rows are looked up in the checkpoint.
    fn rest_of(&self, _table: &Self::Embedding) -> Option<Arc<dyn DeferredWeights>> {
        None
    }

    /// The rows of a product's weights as a table, without a copy of them: for a head that is tied to the embedding.
    fn table_of(&self, weight: &Self::Linear) -> Option<Self::Embedding>;

    /// Matrices of the same inputs, one below the other, computed in `dtype`; a large one is read by `threads` threads.
    ///
    /// # Errors
    /// As [`load_embedding`](Self::load_embedding).
    fn load_linear(
        &self,
        checkpoint: &Checkpoint,
        parts: &[Affine<'_>],
        class: NumericsClass,
        threads: usize,
    ) -> Result<Self::Linear, LoadModelError>;

    /// A norm's weights.
    ///
    /// # Errors
    /// As [`load_embedding`](Self::load_embedding).
    fn load_norm(
        &self,
        checkpoint: &Checkpoint,
        norm: Affine<'_>,
        kind: NormKind,
        epsilon: f64,
    ) -> Result<Self::Norm, LoadModelError>;

    /// A gated network.
    ///
    /// # Errors
    /// As [`load_embedding`](Self::load_embedding).
    fn load_gated(
        &self,
        checkpoint: &Checkpoint,
        tensors: &MlpTensors,
        activation: Activation,
        class: NumericsClass,
    ) -> Result<Self::Gated, LoadModelError>;

    /// The up-projections `expand`, heads x (nope and value elements) x latent.
    ///
    /// # Errors
    /// As [`load_embedding`](Self::load_embedding).
    fn load_heads(
        &self,
        checkpoint: &Checkpoint,
        expand: &TensorRef,
        facts: &MlaFacts,
        class: NumericsClass,
    ) -> Result<Self::Heads, LoadModelError>;

    /// A rotary embedding.
    ///
    /// # Errors
    /// The device has no room.
    fn rope(&self, facts: &RopeFacts) -> Result<Self::Rope, BackendError>;

    /// No pages yet, for these layers. All page tables have pages of one size.
    fn pages(&self, layers: &[PagedLayer]) -> Self::Pages;

    /// Bytes of one page, all layers of a page table together.
    fn page_bytes(pages: &Self::Pages) -> usize;

    /// Brings numbers to the device.
    ///
    /// # Errors
    /// The device has no room.
    fn vector(&self, values: &[f32]) -> Result<Self::Vector, BackendError>;

    /// Makes room for `count` pages, or for as many as the device has memory for beside its workspace. Sequences have up to
    /// `positions` positions. Returns how many.
    ///
    /// # Errors
    /// The device has no room for one.
    fn reserve_pages(
        &self,
        _pages: &mut Self::Pages,
        count: usize,
        _positions: usize,
    ) -> Result<usize, BackendError> {
        Ok(count)
    }

    /// Returns the bytes of the device's memory that `pages` leave to iterations.
    fn workspace_bytes(_pages: &Self::Pages) -> usize {
        0
    }

    /// Prepares the attention of `spans` in all layers of `pages`.
    ///
    /// # Errors
    /// As [`embed`](Self::embed).
    fn spans(&self, pages: &Self::Pages, spans: Vec<Span>) -> Result<Self::Spans, BackendError>;

    /// Copies page `from` to page `to`.
    ///
    /// # Errors
    /// The device has no room for `to`; the same for all operations.
    fn copy_page(&self, pages: &mut Self::Pages, from: usize, to: usize) -> Result<(), BackendError>;

    /// The rows of `table` at `tokens`, which are below its length.
    ///
    /// # Errors
    /// The operation cannot be computed; the same for all of them.
    fn embed(&self, table: &Self::Embedding, tokens: &[u32]) -> Result<Self::Tensor, BackendError>;

    /// `x weight' + bias` in the dtype of the weights.
    ///
    /// # Errors
    /// As [`embed`](Self::embed).
    fn linear(&self, weight: &Self::Linear, x: &Self::Tensor) -> Result<Self::Tensor, BackendError>;

    /// Normalisation of every run of as many elements as there are weights, rounded as its kind says, computed in
    /// float32.
    ///
    /// # Errors
    /// As [`embed`](Self::embed).
    fn norm(&self, norm: &Self::Norm, x: &Self::Tensor) -> Result<Self::Tensor, BackendError>;

    /// Splits the columns of `x` into parts of these widths.
    ///
    /// # Errors
    /// As [`embed`](Self::embed).
    fn split<const N: usize>(
        &self,
        x: Self::Tensor,
        widths: [usize; N],
    ) -> Result<[Self::Tensor; N], BackendError>;

    /// Every element between -`bound` and `bound`.
    ///
    /// # Errors
    /// As [`embed`](Self::embed).
    fn clamp(&self, x: Self::Tensor, bound: f64) -> Result<Self::Tensor, BackendError>;

    /// Cosines and sines at `positions`, one for each row.
    ///
    /// # Errors
    /// As [`embed`](Self::embed).
    fn angles(&self, rope: &Self::Rope, positions: &[usize]) -> Result<Self::Angles, BackendError>;

    /// The angles of the rows at `rows`.
    ///
    /// # Errors
    /// As [`embed`](Self::embed).
    fn angles_of(&self, angles: &Self::Angles, rows: &[usize]) -> Result<Self::Angles, BackendError>;

    /// Rotates the last elements of every head of `head_dim`, as many as the embedding has.
    ///
    /// # Errors
    /// As [`embed`](Self::embed).
    fn rotate(
        &self,
        angles: &Self::Angles,
        x: Self::Tensor,
        head_dim: usize,
    ) -> Result<Self::Tensor, BackendError>;

    /// As [`rotate`](Self::rotate), of two tensors with the same rows.
    ///
    /// # Errors
    /// As [`embed`](Self::embed).
    fn rotate_both(
        &self,
        angles: &Self::Angles,
        [first, second]: [Self::Tensor; 2],
        head_dims: [usize; 2],
    ) -> Result<[Self::Tensor; 2], BackendError> {
        Ok([self.rotate(angles, first, head_dims[0])?, self.rotate(angles, second, head_dims[1])?])
    }

    /// Writes the keys and values of the spans to their pages and attends: rows x (heads x value elements). `sinks`
    /// has one element for each head.
    ///
    /// # Errors
    /// As [`embed`](Self::embed).
    fn attend(
        &self,
        pages: &mut Self::Pages,
        layer: usize,
        query_key_value: [Self::Tensor; 3],
        sinks: Option<&Self::Vector>,
        spans: &Self::Spans,
    ) -> Result<Self::Tensor, BackendError>;

    /// As [`attend`](Self::attend), for latent attention. Query: rows x heads x (nope and rotated elements); latent:
    /// rows x latent; key: rows x rotated elements.
    ///
    /// # Errors
    /// As [`embed`](Self::embed).
    fn attend_latent(
        &self,
        pages: &mut Self::Pages,
        layer: usize,
        heads: &Self::Heads,
        query_latent_key: [Self::Tensor; 3],
        spans: &Self::Spans,
    ) -> Result<Self::Tensor, BackendError>;

    /// `x + y`.
    ///
    /// # Errors
    /// As [`embed`](Self::embed).
    fn add(&self, x: Self::Tensor, y: &Self::Tensor) -> Result<Self::Tensor, BackendError>;

    /// Adds `y` to as many rows of `x`, from row `first` on.
    ///
    /// # Errors
    /// As [`embed`](Self::embed).
    fn add_rows(&self, x: &mut Self::Tensor, first: usize, y: &Self::Tensor) -> Result<(), BackendError>;

    /// down(act(gate(x)) * up(x)).
    ///
    /// # Errors
    /// As [`embed`](Self::embed).
    fn gated(&self, network: &Self::Gated, x: &Self::Tensor) -> Result<Self::Tensor, BackendError>;

    /// `x` times `factor`.
    ///
    /// # Errors
    /// As [`embed`](Self::embed).
    fn scale(&self, x: Self::Tensor, factor: f64) -> Result<Self::Tensor, BackendError>;

    /// Each row of `x` times the sigmoid of `gate`'s only element.
    ///
    /// # Errors
    /// As [`embed`](Self::embed).
    fn scale_by_sigmoid(&self, x: Self::Tensor, gate: &Self::Tensor) -> Result<Self::Tensor, BackendError>;

    /// The rows at `rows`.
    ///
    /// # Errors
    /// As [`embed`](Self::embed).
    fn rows(&self, x: &Self::Tensor, rows: &[usize]) -> Result<Self::Tensor, BackendError>;

    /// Returns the elements of `x`, little endian, on the host.
    ///
    /// # Errors
    /// As [`embed`](Self::embed).
    fn bytes<'a>(&self, x: &'a Self::Tensor) -> Result<Cow<'a, [u8]>, BackendError>;

    /// Returns the elements of `x` as float32 on the host.
    ///
    /// # Errors
    /// As [`embed`](Self::embed).
    fn floats(&self, x: &Self::Tensor) -> Result<Vec<f32>, BackendError>;

    /// Routes the rows of `x`: their elements, little endian, and the experts of each, on the host.
    ///
    /// # Errors
    /// As [`embed`](Self::embed).
    fn route<'a>(
        &self,
        router: &Router<Self>,
        x: &'a Self::Tensor,
    ) -> Result<(Cow<'a, [u8]>, Routed), BackendError> {
        let logits = self.floats(&self.linear(&router.linear, x)?)?;
        Ok((self.bytes(x)?, router.rule.routed(&logits)))
    }

    /// Returns where the `count` largest elements of each row are, and these, row by row. Those of a row that has one that
    /// is not finite are not finite. For backends with [`SELECTS_LOGITS`](Self::SELECTS_LOGITS) alone.
    ///
    /// # Errors
    /// As [`embed`](Self::embed).
    fn likeliest(&self, _x: &Self::Tensor, _count: usize) -> Result<(Vec<u32>, Vec<f32>), BackendError> {
        Err(BackendError::Shape { what: "selection of logits by this backend", actual: 0, expected: 1 })
    }

    /// A tensor of `rows` x `width` that `fill` writes on the host, every byte of it.
    ///
    /// # Errors
    /// As [`embed`](Self::embed), and those of `fill`.
    fn filled<E: From<BackendError>>(
        &self,
        rows: usize,
        width: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<Self::Tensor, E>;
}
