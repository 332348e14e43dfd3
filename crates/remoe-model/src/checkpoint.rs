//! An open checkpoint. Opening it reads no weights; tensors are then read by ranges.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use crate::config::ModelConfig;
use crate::config_file::{prediction_layers, quantisation};
use crate::decode::{self, NotFinite};
use crate::error::CheckpointError;
use crate::facts::{ExpertsDtype, StoredDtype};
use crate::fields::Fields;
use crate::fingerprint::{self, Fingerprint};
use crate::generation::GenerationDefaults;
use crate::inspection::Inspection;
use crate::layout::{self, LayerMlp, LayerTensors, Layout};
use crate::quantised_form::QuantisedForm;
use crate::shards::{Shards, TensorLocation};
use crate::sizes::Sizes;
use crate::store::{FileRange, Folder, Store};
use crate::tensors::{
    AttentionTensors, ExpertTensors, Linear, MlpTensors, NormTensors, RouterTensors, Scales, SharedTensors,
    StoredAs, TensorRef,
};
use crate::{json, modelopt};

/// An open checkpoint in the Hugging Face layout. Its safetensors headers match its config.
///
/// Layers are numbered from 0, as in the config. The files stay open: replacing a file on disk does not change what is
/// read; truncating it in place gives [`CheckpointError::ShortRead`].
#[derive(Debug)]
pub struct Checkpoint {
    store: Arc<dyn Store>,
    config: ModelConfig,
    generation: GenerationDefaults,
    shards: Shards,
    layout: Layout,
    quantised_form: Option<QuantisedForm>,
}

/// Scales of the blocks of an fp8 matrix, in row-major order, and the rows and columns of a block.
pub type BlockScales = (Vec<f32>, [usize; 2]);

impl Checkpoint {
    /// Opens a folder: parses `config.json`, `generation_config.json` and the headers of the safetensors files, and
    /// checks name, shape and type of every tensor of the model. Other tensors are errors, except those that
    /// [`crate::Ignored`] counts.
    ///
    /// # Errors
    /// Names the file, and the field or tensor that is wrong, if any.
    pub fn open(folder: impl AsRef<Path>) -> Result<Self, CheckpointError> {
        Self::open_in(Arc::new(Folder::new(folder.as_ref())))
    }

    /// Opens a checkpoint like [`Self::open`], from any store.
    ///
    /// # Errors
    /// Fails as [`Self::open`] does.
    pub fn open_in(store: Arc<dyn Store>) -> Result<Self, CheckpointError> {
        const CONFIG: &str = "config.json";
        let path = store.root().join(CONFIG);
        let Some(object) = json::object_if_present(&*store, CONFIG)? else {
            return Err(CheckpointError::MissingFile {
                path,
                message: "a model folder has config.json and safetensors files".to_owned(),
            });
        };
        // An unsupported config is reported before any weight file is opened.
        ModelConfig::from_object(&path, &object, None)?;
        modelopt::refuse(&*store)?;
        let shards = Shards::open(&*store)?;
        let config = ModelConfig::from_object(&path, &object, layout::stored_dtype(&shards))?;
        let generation = GenerationDefaults::open(&*store, &config)?;
        let quantisation = quantisation(&path, &object)?;
        let extra_layers = prediction_layers(&path, &object)?;
        let layout = layout::resolve(&config, extra_layers, quantisation.as_ref(), &shards)?;
        if let Some(quantisation) = &quantisation {
            quantisation.check_stored(Fields::new(&path, &object), &shards)?;
        }
        let quantised_form = quantisation.map(|quantisation| quantisation.form);
        Ok(Self { store, config, generation, shards, layout, quantised_form })
    }

    /// Returns the store of the checkpoint's files.
    #[must_use]
    pub fn store(&self) -> &dyn Store {
        &*self.store
    }

    /// Returns the model's configuration.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Sets the context length that is served. It may be shorter than the model's own. With rope type longrope it may
    /// also exceed the original context: the factors for long texts then apply at every position.
    ///
    /// # Errors
    /// `positions` is 0, or more than the model supports.
    pub fn set_positions(&mut self, positions: usize) -> Result<(), CheckpointError> {
        let invalid = |why| {
            let path = self.store.root().join("config.json");
            CheckpointError::field_value(&path, "max_position_embeddings", why)
        };
        self.config = self.config.clone().for_positions(positions).map_err(invalid)?;
        Ok(())
    }

    /// Returns the sampling defaults of `generation_config.json`.
    #[must_use]
    pub fn generation(&self) -> &GenerationDefaults {
        &self.generation
    }

    /// Returns the paths of the safetensors files. [`TensorRef::file`] is an index into them.
    pub fn files(&self) -> impl ExactSizeIterator<Item = &Path> {
        self.shards.files.iter().map(|shard| shard.path.as_path())
    }

    /// Returns the names of all tensors in the files, sorted, including ignored ones ([`crate::Ignored`]).
    #[must_use]
    pub fn tensor_names(&self) -> Vec<&str> {
        self.shards.names()
    }

    /// Returns a tensor by its name, if it exists and has one of the types of [`StoredDtype`].
    #[must_use]
    pub fn tensor(&self, name: &str) -> Option<TensorRef> {
        self.shards.tensor(name)
    }

    /// Returns the embedding: `[vocabulary, hidden]`.
    #[must_use]
    pub fn embedding(&self) -> &TensorRef {
        &self.layout.embedding
    }

    /// Returns the learned position embedding, if the model has one: `[context, hidden]`.
    #[must_use]
    pub fn positions(&self) -> Option<&TensorRef> {
        self.layout.positions.as_ref()
    }

    /// Returns the head: `[vocabulary, hidden]`. If it is tied and stored once, this is the embedding.
    #[must_use]
    pub fn head(&self) -> &TensorRef {
        &self.layout.head
    }

    /// Reports if head and embedding are one tensor on disk, which needs to be loaded only once.
    #[must_use]
    pub fn head_is_embedding(&self) -> bool {
        self.layout.head.name == self.layout.embedding.name
    }

    /// Returns the head's bias, if it has one: `[vocabulary]`.
    #[must_use]
    pub fn head_bias(&self) -> Option<&TensorRef> {
        self.layout.head_bias.as_ref()
    }

    /// Returns the norm before the head.
    #[must_use]
    pub fn final_norm(&self) -> &Linear {
        &self.layout.final_norm
    }

    /// Returns the norms of a layer.
    ///
    /// # Errors
    /// The model has no such layer.
    pub fn norms(&self, layer: usize) -> Result<&NormTensors, CheckpointError> {
        self.layer(layer).map(|tensors| &tensors.norms)
    }

    /// Returns the attention tensors of a layer.
    ///
    /// # Errors
    /// The model has no such layer.
    pub fn attention(&self, layer: usize) -> Result<&AttentionTensors, CheckpointError> {
        self.layer(layer).map(|tensors| &tensors.attention)
    }

    /// Returns the MLP of a dense layer, or `None` if the layer has routed experts.
    ///
    /// # Errors
    /// The model has no such layer.
    pub fn dense(&self, layer: usize) -> Result<Option<&MlpTensors>, CheckpointError> {
        Ok(match &self.layer(layer)?.mlp {
            LayerMlp::Dense(mlp) => Some(mlp),
            LayerMlp::Moe { .. } => None,
        })
    }

    /// Returns the router of a layer, or `None` if the layer is dense.
    ///
    /// # Errors
    /// The model has no such layer.
    pub fn router(&self, layer: usize) -> Result<Option<&RouterTensors>, CheckpointError> {
        Ok(match &self.layer(layer)?.mlp {
            LayerMlp::Moe { router, .. } => Some(router),
            LayerMlp::Dense(_) => None,
        })
    }

    /// Returns the shared experts of a layer, or `None` if it has none.
    ///
    /// # Errors
    /// The model has no such layer.
    pub fn shared(&self, layer: usize) -> Result<Option<&SharedTensors>, CheckpointError> {
        Ok(match &self.layer(layer)?.mlp {
            LayerMlp::Moe { shared, .. } => shared.as_ref(),
            LayerMlp::Dense(_) => None,
        })
    }

    /// Returns the bias that a layer adds once to the sum of its routed experts, if it has one: `[hidden]`.
    ///
    /// # Errors
    /// The model has no such layer.
    pub fn experts_bias(&self, layer: usize) -> Result<Option<&TensorRef>, CheckpointError> {
        Ok(match &self.layer(layer)?.mlp {
            LayerMlp::Moe { bias, .. } => bias.as_ref(),
            LayerMlp::Dense(_) => None,
        })
    }

    /// Returns the tensors of one routed expert, in any layout of the experts.
    ///
    /// # Errors
    /// The model has no such layer or expert.
    pub fn expert(&self, layer: usize, expert: usize) -> Result<ExpertTensors, CheckpointError> {
        let LayerMlp::Moe { experts, .. } = &self.layer(layer)?.mlp else {
            return Err(self.request(format!("layer {layer} is dense, it has no routed experts")));
        };
        experts.get(expert).ok_or_else(|| {
            self.request(format!("layer {layer} has no expert {expert}, it has {}", experts.len()))
        })
    }

    /// Reads all elements of a tensor's byte range, and decodes them to the tensor's dtype.
    ///
    /// # Errors
    /// The file cannot be read or was truncated, or a quantised element is not finite.
    pub fn read(&self, tensor: &TensorRef) -> Result<Vec<u8>, CheckpointError> {
        let mut bytes = Vec::new();
        self.read_rows(tensor, 0..tensor.stored_rows(), &mut bytes)?;
        Ok(bytes)
    }

    /// Reads some rows of a tensor's byte range, decoded to the tensor's dtype, into `target`, which is overwritten.
    ///
    /// # Errors
    /// The rows are outside the tensor, or an error of [`Self::read`].
    pub fn read_rows(
        &self,
        tensor: &TensorRef,
        rows: Range<usize>,
        target: &mut Vec<u8>,
    ) -> Result<(), CheckpointError> {
        if rows.start > rows.end || rows.end > tensor.stored_rows() {
            return Err(self.request(format!(
                "invalid rows {rows:?} of `{}`: it has {}",
                tensor.name,
                tensor.stored_rows()
            )));
        }
        let StoredAs::Plain = tensor.stored else { return self.decode_rows(tensor, rows, target) };
        let range = tensor.row_range(&rows);
        target.resize(self.length(tensor, range.end - range.start)?, 0);
        self.read_into(tensor, range, target)
    }

    /// Reads and decodes rows of a quantised tensor.
    fn decode_rows(
        &self,
        tensor: &TensorRef,
        rows: Range<usize>,
        target: &mut Vec<u8>,
    ) -> Result<(), CheckpointError> {
        let range = tensor.row_range(&rows);
        let columns = tensor.stored_columns();
        let mut codes = vec![0; self.length(tensor, range.end - range.start)?];
        self.read_into(tensor, range, &mut codes)?;
        target.clear();
        target.reserve(self.length(tensor, rows.len() as u64 * columns as u64 * tensor.dtype.bytes())?);
        let done = match &tensor.stored {
            StoredAs::Plain => Ok(()),
            StoredAs::Fp8 { block: [height, width], scales, scale_dtype } => {
                let block_rows = decode::block_rows(&rows, *height);
                let per_row = columns.div_ceil(*width);
                let bytes = self.read_scales(scales, &block_rows, per_row * scale_dtype.bytes() as usize)?;
                let values = decode::scales(&bytes, *scale_dtype);
                let scale = |row: usize, column: usize| {
                    let row = (rows.start + row) / height - block_rows.start;
                    values.get(row * per_row + column).copied().unwrap_or(f32::NAN)
                };
                decode::fp8(&codes, columns, *width, scale, tensor.dtype, target)
            }
            StoredAs::Mxfp4 { scales } => {
                let exponents = self.read_scales(scales, &rows, columns / decode::MXFP4_GROUP)?;
                decode::mxfp4(&codes, &exponents, columns, tensor.dtype, target)
            }
        };
        done.map_err(|place| self.not_finite(tensor, rows.start, &place))
    }

    /// Returns the error for an element that is not finite. `first` is the row at which decoding began.
    fn not_finite(&self, tensor: &TensorRef, first: usize, place: &NotFinite) -> CheckpointError {
        let NotFinite { row, column, why } = place;
        let path = self.shards.files.get(tensor.file).map_or(self.store.root(), |shard| &shard.path);
        CheckpointError::tensor(path, &tensor.name, format!("element [{}, {column}]: {why}", first + row))
    }

    /// Reads the codes of some rows of a matrix that is stored as fp8 into `target`, which is overwritten.
    ///
    /// # Errors
    /// The rows are outside the tensor, the file cannot be read, or a code is NaN.
    pub fn read_codes(
        &self,
        tensor: &TensorRef,
        rows: Range<usize>,
        target: &mut Vec<u8>,
    ) -> Result<(), CheckpointError> {
        let (StoredAs::Fp8 { .. }, None) = (&tensor.stored, tensor.strides) else {
            return Err(self.request(format!("`{}` is not stored as fp8", tensor.name)));
        };
        if rows.start > rows.end || rows.end > tensor.stored_rows() {
            return Err(self.request(format!("invalid rows {rows:?} of `{}`", tensor.name)));
        }
        let range = tensor.row_range(&rows);
        target.resize(self.length(tensor, range.end - range.start)?, 0);
        self.read_into(tensor, range, target)?;
        match decode::find_nan(target) {
            None => Ok(()),
            Some((at, why)) => {
                let columns = tensor.stored_columns().max(1);
                let place = NotFinite { row: at / columns, column: at % columns, why };
                Err(self.not_finite(tensor, rows.start, &place))
            }
        }
    }

    /// Reads the block scales of a matrix that is stored as fp8. Returns `None` for other matrices.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn fp8_scales(&self, tensor: &TensorRef) -> Result<Option<BlockScales>, CheckpointError> {
        let (StoredAs::Fp8 { block, scales, scale_dtype }, None) = (&tensor.stored, tensor.strides) else {
            return Ok(None);
        };
        let rows = 0..tensor.stored_rows().div_ceil(block[0].max(1));
        let per_row = tensor.stored_columns().div_ceil(block[1].max(1));
        let bytes = self.read_scales(scales, &rows, per_row * scale_dtype.bytes() as usize)?;
        Ok(Some((decode::scales(&bytes, *scale_dtype), *block)))
    }

    /// Checks that routed experts can be kept in memory as `experts` if the compute dtype is `dtype`.
    ///
    /// # Errors
    /// [`ExpertsDtype::Fp8`] is requested, but the experts are not stored as fp8, their block size is not supported by
    /// the kernels, or the checkpoint's dtype is narrower than `dtype`. Decoded weights are rounded to the checkpoint's
    /// dtype, and experts that stay fp8 must give the same bits.
    pub fn check_experts_dtype(
        &self,
        experts: Option<ExpertsDtype>,
        dtype: StoredDtype,
    ) -> Result<(), CheckpointError> {
        if experts != Some(ExpertsDtype::Fp8) {
            return Ok(());
        }
        let unsupported = |why: String| {
            let path = self.store.root().join("config.json");
            let message = format!("--experts-dtype fp8 requires experts stored as fp8: {why}");
            Err(CheckpointError::unsupported(&path, "quantization_config", message))
        };
        if dtype == StoredDtype::F32 && self.config.dtype != StoredDtype::F32 {
            let stored = self.config.dtype.name();
            return unsupported(format!(
                "these decode to {stored}, which must be the compute dtype; set --dtype {stored}"
            ));
        }
        for layer in self.config.moe_layers() {
            for tensor in self.expert(layer, 0)?.tensors().filter(|tensor| tensor.shape.len() == 2) {
                match (&tensor.stored, tensor.strides) {
                    (StoredAs::Fp8 { block: [height, width], .. }, None)
                        if height.is_multiple_of(4) && width.is_multiple_of(32) => {}
                    (StoredAs::Fp8 { block: [height, width], .. }, None) => {
                        return unsupported(format!(
                            "unsupported fp8 block {height} x {width}, expected multiples of 4 x 32; omit the flag to \
                             decode the experts"
                        ));
                    }
                    _ => {
                        let name = &tensor.name;
                        return unsupported(format!(
                            "`{name}` is stored otherwise; use int8, which takes as much memory"
                        ));
                    }
                }
            }
        }
        Ok(())
    }

    /// Reads `rows` of a matrix of scales; a row has `row_bytes` bytes.
    fn read_scales(
        &self,
        scales: &Scales,
        rows: &Range<usize>,
        row_bytes: usize,
    ) -> Result<Vec<u8>, CheckpointError> {
        let mut bytes = vec![0; rows.len() * row_bytes];
        let range = (rows.start * row_bytes) as u64..(rows.end * row_bytes) as u64;
        let location = TensorLocation {
            name: &scales.name,
            file: scales.file,
            offset: scales.offset,
            bytes: scales.bytes,
        };
        self.shards.read(location, range, &mut bytes)?;
        Ok(bytes)
    }

    /// Converts a byte count to `usize`.
    fn length(&self, tensor: &TensorRef, bytes: u64) -> Result<usize, CheckpointError> {
        usize::try_from(bytes)
            .map_err(|_| self.request(format!("`{}` does not fit into memory", tensor.name)))
    }

    /// Reads the bytes `range` of a tensor, as stored, into `target`, which has the length of the range.
    ///
    /// # Errors
    /// The range is outside the tensor, the lengths differ, or the file cannot be read or was truncated.
    pub fn read_into(
        &self,
        tensor: &TensorRef,
        range: Range<u64>,
        target: &mut [u8],
    ) -> Result<(), CheckpointError> {
        let location = TensorLocation {
            name: &tensor.name,
            file: tensor.file,
            offset: tensor.offset,
            bytes: tensor.bytes,
        };
        self.shards.read(location, range, target)
    }

    /// Fetches tensors that will be read, if the store is remote.
    ///
    /// # Errors
    /// The store cannot provide them.
    pub fn prefetch<'a>(
        &self,
        tensors: impl IntoIterator<Item = &'a TensorRef>,
    ) -> Result<(), CheckpointError> {
        let ranges = tensors
            .into_iter()
            .flat_map(TensorRef::ranges)
            .map(|(name, file, bytes)| {
                let shard = self.shards.files.get(file);
                let shard =
                    shard.ok_or_else(|| self.request(format!("`{name}` belongs to another checkpoint")))?;
                Ok(FileRange { file: &shard.name, bytes })
            })
            .collect::<Result<Vec<_>, CheckpointError>>()?;
        self.store.prefetch(&ranges).map_err(|error| CheckpointError::io(self.store.root(), error))
    }

    /// Returns all tensors of the model except routed experts. A tied tensor may appear twice.
    #[must_use]
    pub fn outside_tensors(&self) -> Vec<&TensorRef> {
        self.layout.outside()
    }

    /// Returns the sizes of the model's parts as stored.
    #[must_use]
    pub fn sizes(&self) -> Sizes {
        Sizes::stored(&self.config, &self.layout)
    }

    /// Returns the output of `remoe inspect`.
    ///
    /// # Errors
    /// As [`Self::fingerprint`].
    pub fn inspect(&self) -> Result<Inspection, CheckpointError> {
        let decoded = self.quantised_form.map(|form| (form, Sizes::decoded(&self.config, &self.layout)));
        Ok(Inspection::new(&self.config, self.sizes(), decoded, self.fingerprint()?, &self.layout.ignored))
    }

    /// Computes the identity of the weights and of the config; see [`Fingerprint`].
    ///
    /// # Errors
    /// A file cannot be read or was truncated.
    pub fn fingerprint(&self) -> Result<Fingerprint, CheckpointError> {
        fingerprint::compute(&self.config, self.quantised_form, &*self.store, &self.shards)
    }

    fn layer(&self, layer: usize) -> Result<&LayerTensors, CheckpointError> {
        self.layout.layers.get(layer).ok_or_else(|| {
            let last = self.layout.layers.len().saturating_sub(1);
            self.request(format!("invalid layer {layer}: expected 0 to {last}"))
        })
    }

    fn request(&self, message: String) -> CheckpointError {
        CheckpointError::Request { path: self.store.root().to_owned(), message }
    }
}
