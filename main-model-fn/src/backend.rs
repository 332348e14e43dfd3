//! Interface between the model's code and the library that computes its tensors.
//!
//! The layers of every model family are written once, in [`crate::transformer`], against the trait [`Backend`]: a set of
//! tensor operations on one device. Two backends implement it: [`crate::Native`], which calls `remoe_kernels` on the
//! CPU, and LibTorch's, a separate crate and program. One backend gives the same bits for the same request. Two
//! backends round in different places, so that their results are only close.

use crate::DeviceName;
use crate::routing::{Routed, RoutingRule};
use remoe_kernels::{AttentionShape, CacheFormat, Dtype, KernelError, NumericsClass, Pool};
use remoe_model::{
    Activation, Checkpoint, CheckpointError, MlaFacts, MlpTensors, NormKind, RopeFacts, TensorRef,
};
use remoe_weights::LoadError;
use std::borrow::Cow;
use std::sync::Arc;

/// Token positions of one KV cache page.
pub use remoe_kernels::PAGE_POSITIONS;

/// Failure of one operation of a [`Backend`].
#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    /// A kernel rejected its operands.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// Weights that are read on first use cannot be read.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The device's library reported an error.
    #[error("{library}: {message}")]
    Library {
        /// Name of the library.
        library: &'static str,
        /// Message of the library.
        message: String,
    },
    /// The device's memory cannot hold a result.
    #[error("out of device memory: {message}")]
    OutOfMemory {
        /// Message of the library.
        message: String,
    },
    /// The device stopped answering; every further operation fails.
    #[error("device lost: {message}")]
    DeviceLost {
        /// Message of the library.
        message: String,
    },
    /// The sizes of two operands do not match: a bug of this program.
    #[error("{what}: expected {expected}, got {actual}")]
    Shape {
        /// Operation or operand with the wrong size.
        what: &'static str,
        /// Given size or index.
        actual: usize,
        /// Size that the other operands require.
        expected: usize,
    },
}

/// Failure to load the model's weights onto the device.
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
    /// The device rejected the weights.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// A thread that loads layers ended abnormally.
    #[error("a thread that loads layers panicked")]
    Panicked,
    /// The checkpoint's facts contradict each other: a bug of this program.
    #[error("inconsistent checkpoint facts: {0}")]
    Inconsistent(&'static str),
}

/// Weights that are loaded in the background, while the first requests are already answered from the checkpoint.
pub trait DeferredWeights: Send + Sync {
    /// Bytes of memory that loading will take; 0 once the weights are in memory.
    fn missing_bytes(&self) -> usize;

    /// Loads the weights, unless they are in memory already.
    ///
    /// # Errors
    /// Fails if the checkpoint cannot be read.
    fn load(&self) -> Result<(), CheckpointError>;
}

/// Entry of a page table for a released page: every later row's attention window begins after its positions.
pub const RELEASED_PAGE: usize = usize::MAX;

/// One layer's attention and the page table of its KV cache.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PagedLayer {
    /// Heads, dimensions, window and cache format of the attention.
    pub shape: AttentionShape,
    /// Index of the page table, shared by all layers whose pages lie in it.
    pub page_table: usize,
}

/// The rows of one sequence within the batch of an iteration.
#[derive(Debug, Clone)]
pub struct RowSpan {
    /// Index of the span's first row in the batch.
    pub first_row: usize,
    /// Number of rows.
    pub rows: usize,
    /// Positions of the sequence that are in the KV cache already.
    pub past: usize,
    /// Page ids by page table ([`PagedLayer::page_table`]) and block of positions; they cover past and new positions.
    pub page_tables: Vec<Vec<usize>>,
}

impl RowSpan {
    /// Index after the span's last row in the batch.
    pub fn end_row(&self) -> usize {
        self.first_row + self.rows
    }

    /// Returns the page ids of page table `index`, in the order of positions.
    pub fn page_table(&self, index: usize) -> &[usize] {
        self.page_tables.get(index).map_or(&[], Vec::as_slice)
    }
}

/// Weights and optional bias of a matrix product (weights: outputs x inputs) or of a norm.
#[derive(Clone, Copy, Debug)]
pub struct Affine<'a> {
    /// Tensor that inputs are multiplied with.
    pub weight: &'a TensorRef,
    /// Tensor that is added to the results: one element per output.
    pub bias: Option<&'a TensorRef>,
}

/// Router of one MoE layer.
pub struct Router<B: Backend> {
    /// Product that maps hidden states to one logit per expert.
    pub linear: B::Linear,
    /// Rule that selects experts by these logits.
    pub rule: RoutingRule,
    /// [`RoutingRule::correction`] on the device.
    pub correction: Option<B::Vector>,
}

impl<B: Backend> Router<B> {
    /// Returns the bytes of the router's weights.
    pub(crate) fn bytes(&self) -> usize {
        self.linear.bytes() + size_of_val(&self.rule.correction[..])
    }
}

/// Weights that stay in memory as long as the model is loaded.
pub trait ResidentPart {
    /// Returns their size in bytes, wherever they are stored.
    fn bytes(&self) -> usize;
}

/// A set of tensor operations on one device.
///
/// A [`Tensor`](Self::Tensor) is a matrix, rows x columns, in the compute dtype unless a method says otherwise.
pub trait Backend: Sized + Send + Sync + 'static {
    /// Name of the backend in flags, logs and errors.
    const NAME: &'static str;
    /// Matrix on the device.
    type Tensor: Send;
    /// Embedding table: one row per token or position.
    type Embedding: Send + ResidentPart;
    /// Weights of a matrix product.
    type Linear: Send + ResidentPart;
    /// Weights of a norm.
    type Norm: Send + ResidentPart;
    /// Weights of a gated MLP.
    type GatedMlp: Send + ResidentPart;
    /// Weights that expand the latent of latent attention (MLA) to keys and values.
    type UpProjections: Send + ResidentPart;
    /// Inverse frequencies of a rotary embedding (RoPE).
    type Rope: Send;
    /// Cosines and sines of the rotary embedding, one row per row of a batch.
    type Angles: Send;
    /// Short float32 vector on the device.
    type Vector: Send;
    /// KV cache: keys and values of every layer, stored in pages.
    type Pages: Send;
    /// Row spans of an iteration, prepared for the attention of all layers.
    type PreparedSpans: Send;

    /// True if the output of shared experts stays on the device and is added there.
    ///
    /// The host then waits for the routed experts only. The sum is then rounded once more than on the host.
    const ADDS_SHARED: bool = false;

    /// True if the device selects the largest logits, so that the others are not copied to the host.
    const SELECTS_LOGITS: bool = false;

    /// Opens `device`, or the best available device if `None`.
    ///
    /// # Errors
    /// Fails if the device does not exist or belongs to another backend.
    fn open(device: Option<DeviceName>, dtype: Dtype, pool: &Arc<Pool>) -> Result<Self, crate::DeviceError>;

    /// Returns the device that computes.
    fn device(&self) -> DeviceName;

    /// Sets the format of keys and values in pages that are created later.
    ///
    /// Returns false if the backend supports only the compute dtype ([`CacheFormat::Plain`]) and `format` differs.
    fn set_cache_format(&mut self, format: CacheFormat) -> bool {
        format == CacheFormat::Plain
    }

    /// Returns the format of keys and values in pages.
    fn cache_format(&self) -> CacheFormat {
        CacheFormat::Plain
    }

    /// Prepares the calling thread. The engine's thread calls this before any other operation.
    fn enter_thread(&self) {}

    /// Attributes the following operations to `layer`, or to none, in the backend's operation counts.
    fn enter_layer(&self, _layer: Option<usize>) {}

    /// Loads an embedding table, stored in the compute dtype or in the format of `class`.
    ///
    /// [`embed`](Self::embed) returns rows in the compute dtype either way.
    /// # Errors
    /// Fails if the checkpoint cannot be read or if the device has no memory left. All `load_*` methods fail so.
    fn load_embedding(
        &self,
        checkpoint: &Arc<Checkpoint>,
        table: &TensorRef,
        class: NumericsClass,
    ) -> Result<Self::Embedding, LoadModelError>;

    /// Returns the part of `table` that is not loaded yet. Until it is, [`embed`](Self::embed) reads rows from the checkpoint.
    fn deferred_weights(&self, _table: &Self::Embedding) -> Option<Arc<dyn DeferredWeights>> {
        None
    }

    /// Returns the weights of a product as an embedding table, without a copy, for an output head tied to the embedding.
    ///
    /// Returns `None` if the backend needs two copies.
    fn tied_embedding(&self, weight: &Self::Linear) -> Option<Self::Embedding>;

    /// Loads matrices with the same inputs, stacked into one, for products computed with numerics `class`.
    ///
    /// A large matrix is read by `threads` threads.
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

    /// Loads a norm's weights. `epsilon` is added to the variance.
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

    /// Loads a gated MLP.
    ///
    /// # Errors
    /// As [`load_embedding`](Self::load_embedding).
    fn load_gated(
        &self,
        checkpoint: &Checkpoint,
        tensors: &MlpTensors,
        activation: Activation,
        class: NumericsClass,
    ) -> Result<Self::GatedMlp, LoadModelError>;

    /// Loads the up-projections of latent attention. `expand`: heads x (nope and value elements) x latent elements.
    ///
    /// # Errors
    /// As [`load_embedding`](Self::load_embedding).
    fn load_up_projections(
        &self,
        checkpoint: &Checkpoint,
        expand: &TensorRef,
        facts: &MlaFacts,
        class: NumericsClass,
    ) -> Result<Self::UpProjections, LoadModelError>;

    /// Creates a rotary embedding.
    ///
    /// # Errors
    /// Fails if the device has no memory left.
    fn rope(&self, facts: &RopeFacts) -> Result<Self::Rope, BackendError>;

    /// Creates the KV cache of `layers`, without pages. Pages of all page tables have the same size.
    fn new_pages(&self, layers: &[PagedLayer]) -> Self::Pages;

    /// Returns the bytes of one page, which holds [`PAGE_POSITIONS`] positions of every layer of
    /// its page table.
    fn page_bytes(pages: &Self::Pages) -> usize;

    /// Copies `values` to the device.
    ///
    /// # Errors
    /// Fails if the device has no memory left.
    fn upload_vector(&self, values: &[f32]) -> Result<Self::Vector, BackendError>;

    /// Reserves memory for `count` pages, or for as many as fit beside the workspace, which is sized for sequences of up to
    /// `positions` positions. Returns the number reserved.
    ///
    /// # Errors
    /// Fails if the device cannot hold a single page.
    fn reserve_pages(
        &self,
        _pages: &mut Self::Pages,
        count: usize,
        _positions: usize,
    ) -> Result<usize, BackendError> {
        Ok(count)
    }

    /// Returns the bytes of device memory that are reserved for iterations beside `pages`; 0 if the backend reserves none.
    fn workspace_bytes(_pages: &Self::Pages) -> usize {
        0
    }

    /// Prepares `spans` for the attention of all layers of `pages`.
    ///
    /// # Errors
    /// Fails if an operation cannot be computed, as [`embed`](Self::embed) does.
    fn prepare_spans(
        &self,
        pages: &Self::Pages,
        spans: Vec<RowSpan>,
    ) -> Result<Self::PreparedSpans, BackendError>;

    /// Copies the keys and values of page `from` to page `to`.
    ///
    /// # Errors
    /// Fails if the device has no memory for `to`.
    fn copy_page(&self, pages: &mut Self::Pages, from: usize, to: usize) -> Result<(), BackendError>;

    /// Looks up `tokens` in `table`: tokens x hidden. Each token must be below the table's row count.
    ///
    /// # Errors
    /// Fails if the operation cannot be computed. All operations of this trait fail so.
    fn embed(&self, table: &Self::Embedding, tokens: &[u32]) -> Result<Self::Tensor, BackendError>;

    /// Computes `x weight' + bias` in the dtype of the weights.
    ///
    /// # Errors
    /// As [`embed`](Self::embed).
    fn linear(&self, weight: &Self::Linear, x: &Self::Tensor) -> Result<Self::Tensor, BackendError>;

    /// Normalises consecutive groups of columns in float32. A group (a row, or a head of it) is as long as the norm's weights.
    /// [`NormKind`] says where it rounds.
    ///
    /// # Errors
    /// As [`embed`](Self::embed).
    fn norm(&self, norm: &Self::Norm, x: &Self::Tensor) -> Result<Self::Tensor, BackendError>;

    /// Splits the columns of `x` into matrices with these widths.
    ///
    /// # Errors
    /// As [`embed`](Self::embed).
    fn split<const N: usize>(
        &self,
        x: Self::Tensor,
        widths: [usize; N],
    ) -> Result<[Self::Tensor; N], BackendError>;

    /// Clamps every element to the range from -`bound` to `bound`.
    ///
    /// # Errors
    /// As [`embed`](Self::embed).
    fn clamp(&self, x: Self::Tensor, bound: f64) -> Result<Self::Tensor, BackendError>;

    /// Computes cosines and sines for `positions`, one per row.
    ///
    /// # Errors
    /// As [`embed`](Self::embed).
    fn angles(&self, rope: &Self::Rope, positions: &[usize]) -> Result<Self::Angles, BackendError>;

    /// Selects the angles of `rows`, in that order.
    ///
    /// # Errors
    /// As [`embed`](Self::embed).
    fn select_angles(&self, angles: &Self::Angles, rows: &[usize]) -> Result<Self::Angles, BackendError>;

    /// Rotates the last elements of every head. Heads have `head_dim` elements; the rotary embedding says how many rotate.
    ///
    /// # Errors
    /// As [`embed`](Self::embed).
    fn rotate(
        &self,
        angles: &Self::Angles,
        x: Self::Tensor,
        head_dim: usize,
    ) -> Result<Self::Tensor, BackendError>;

    /// Rotates two tensors with the same rows, each as [`rotate`](Self::rotate) does.
    ///
    /// # Errors
    /// As [`embed`](Self::embed).
    fn rotate_pair(
        &self,
        angles: &Self::Angles,
        [first, second]: [Self::Tensor; 2],
        head_dims: [usize; 2],
    ) -> Result<[Self::Tensor; 2], BackendError> {
        Ok([self.rotate(angles, first, head_dims[0])?, self.rotate(angles, second, head_dims[1])?])
    }

    /// Appends the spans' keys and values to their pages, then computes attention: rows x (heads x value elements).
    ///
    /// `sinks`: one attention sink logit per head.
    ///
    /// # Errors
    /// As [`embed`](Self::embed).
    fn attend(
        &self,
        pages: &mut Self::Pages,
        layer: usize,
        query_key_value: [Self::Tensor; 3],
        sinks: Option<&Self::Vector>,
        spans: &Self::PreparedSpans,
    ) -> Result<Self::Tensor, BackendError>;

    /// Computes latent attention (MLA), as [`attend`](Self::attend) does otherwise.
    ///
    /// Query: rows x heads x (nope and rotated elements); latent: rows x latent elements; key: rows x rotated elements.
    ///
    /// # Errors
    /// As [`embed`](Self::embed).
    fn attend_latent(
        &self,
        pages: &mut Self::Pages,
        layer: usize,
        projections: &Self::UpProjections,
        query_latent_key: [Self::Tensor; 3],
        spans: &Self::PreparedSpans,
    ) -> Result<Self::Tensor, BackendError>;

    /// Computes `x + y`.
    ///
    /// # Errors
    /// As [`embed`](Self::embed).
    fn add(&self, x: Self::Tensor, y: &Self::Tensor) -> Result<Self::Tensor, BackendError>;

    /// Adds `y` to the rows of `x` from row `first` on.
    ///
    /// # Errors
    /// As [`embed`](Self::embed).
    fn add_rows(&self, x: &mut Self::Tensor, first: usize, y: &Self::Tensor) -> Result<(), BackendError>;

    /// Computes the gated MLP `down(act(gate(x)) * up(x))`.
    ///
    /// # Errors
    /// As [`embed`](Self::embed).
    fn gated(&self, network: &Self::GatedMlp, x: &Self::Tensor) -> Result<Self::Tensor, BackendError>;

    /// Multiplies `x` by `factor`.
    ///
    /// # Errors
    /// As [`embed`](Self::embed).
    fn scale(&self, x: Self::Tensor, factor: f64) -> Result<Self::Tensor, BackendError>;

    /// Multiplies each row of `x` by the sigmoid of the row's only element in `gate` (rows x 1).
    ///
    /// # Errors
    /// As [`embed`](Self::embed).
    fn scale_by_sigmoid(&self, x: Self::Tensor, gate: &Self::Tensor) -> Result<Self::Tensor, BackendError>;

    /// Selects `rows` of `x`, in that order.
    ///
    /// # Errors
    /// As [`embed`](Self::embed).
    fn select_rows(&self, x: &Self::Tensor, rows: &[usize]) -> Result<Self::Tensor, BackendError>;

    /// Returns the elements of `x` on the host, little endian.
    ///
    /// # Errors
    /// As [`embed`](Self::embed).
    fn host_bytes<'a>(&self, x: &'a Self::Tensor) -> Result<Cow<'a, [u8]>, BackendError>;

    /// Returns the elements of `x` on the host as float32.
    ///
    /// # Errors
    /// As [`embed`](Self::embed).
    fn host_floats(&self, x: &Self::Tensor) -> Result<Vec<f32>, BackendError>;

    /// Routes the rows of `x`. Returns their elements on the host, little endian, and the experts of each row.
    ///
    /// # Errors
    /// As [`embed`](Self::embed).
    fn route<'a>(
        &self,
        router: &Router<Self>,
        x: &'a Self::Tensor,
    ) -> Result<(Cow<'a, [u8]>, Routed), BackendError> {
        let logits = self.host_floats(&self.linear(&router.linear, x)?)?;
        Ok((self.host_bytes(x)?, router.rule.route(&logits)))
    }

    /// Returns the column indices and values of the `count` largest elements of each row, row by row.
    ///
    /// If an element of a row is not finite, its returned values are not finite either. The engine calls this only for
    /// backends with [`SELECTS_LOGITS`](Self::SELECTS_LOGITS).
    ///
    /// # Errors
    /// As [`embed`](Self::embed).
    fn largest_logits(&self, _x: &Self::Tensor, _count: usize) -> Result<(Vec<u32>, Vec<f32>), BackendError> {
        Err(BackendError::Shape { what: "selection of logits by this backend", actual: 0, expected: 1 })
    }

    /// Creates a tensor, `rows` x `width`, from bytes on the host: `fill` writes every byte, little endian.
    ///
    /// # Errors
    /// As [`embed`](Self::embed); also returns errors of `fill`.
    fn tensor_from_host<E: From<BackendError>>(
        &self,
        rows: usize,
        width: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<Self::Tensor, E>;
}
