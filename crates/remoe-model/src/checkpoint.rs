//! A checkpoint: opened without reading a weight, read by ranges.

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
use crate::shards::{Shards, TensorLocation};
use crate::sizes::Sizes;
use crate::store::{FileRange, Folder, Store};
use crate::stored_form::ShortForm;
use crate::tensors::{
    AttentionTensors, ExpertTensors, Linear, MlpTensors, NormTensors, RouterTensors, Scales, SharedTensors,
    StoredAs, TensorRef,
};
use crate::{json, modelopt};

/// An open checkpoint in the Hugging Face layout whose headers have been checked against its config.
///
/// Layer ids are the model's own, from 0. The files stay open; replacing a file on disk does not
/// change what is read here, shortening it in place gives [`CheckpointError::ShortRead`].
#[derive(Debug)]
pub struct Checkpoint {
    store: Arc<dyn Store>,
    config: ModelConfig,
    generation: GenerationDefaults,
    shards: Shards,
    layout: Layout,
    short_form: Option<ShortForm>,
}

/// Scales of a matrix of fp8 codes, row by row of blocks, and the rows and columns of a block.
pub type BlockScales = (Vec<f32>, [usize; 2]);

impl Checkpoint {
    /// Opens a folder: `config.json`, `generation_config.json` and the headers of the safetensors
    /// files are parsed, and every tensor of the model is found with its shape and type. Every other tensor
    /// is an error, but for those of [`crate::Ignored`].
    ///
    /// # Errors
    /// The file and, where there is one, the field or tensor that is wrong.
    pub fn open(folder: impl AsRef<Path>) -> Result<Self, CheckpointError> {
        Self::open_in(Arc::new(Folder::new(folder.as_ref())))
    }

    /// As [`Self::open`], from any store.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_in(store: Arc<dyn Store>) -> Result<Self, CheckpointError> {
        const CONFIG: &str = "config.json";
        let path = store.root().join(CONFIG);
        let Some(object) = json::object_if_present(&*store, CONFIG)? else {
            return Err(CheckpointError::MissingFile {
                path,
                message: "a model folder has config.json and safetensors files".to_owned(),
            });
        };
        // A config that is refused is reported before any weight file is looked at.
        ModelConfig::from_object(&path, &object, None)?;
        modelopt::refuse(&*store)?;
        let shards = Shards::open(&*store)?;
        let config = ModelConfig::from_object(&path, &object, layout::stored_dtype(&shards))?;
        let generation = GenerationDefaults::open(&*store, &config)?;
        let quantisation = quantisation(&path, &object)?;
        let further = prediction_layers(&path, &object)?;
        let layout = layout::resolve(&config, further, quantisation.as_ref(), &shards)?;
        if let Some(quantisation) = &quantisation {
            quantisation.check_stored(Fields::new(&path, &object), &shards)?;
        }
        let short_form = quantisation.map(|quantisation| quantisation.form);
        Ok(Self { store, config, generation, shards, layout, short_form })
    }

    /// Where its files are.
    #[must_use]
    pub fn store(&self) -> &dyn Store {
        &*self.store
    }

    /// The model.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Has texts of `positions` served: fewer than otherwise, or more than the training of a rotation of type longrope
    /// had, with that for long texts at every position.
    ///
    /// # Errors
    /// The model is not made for as many, or there are none.
    pub fn set_positions(&mut self, positions: usize) -> Result<(), CheckpointError> {
        let refused = |why| {
            let path = self.store.root().join("config.json");
            CheckpointError::field_value(&path, "max_position_embeddings", why)
        };
        self.config = self.config.clone().for_positions(positions).map_err(refused)?;
        Ok(())
    }

    /// Returns the sampling defaults of `generation_config.json`.
    #[must_use]
    pub fn generation(&self) -> &GenerationDefaults {
        &self.generation
    }

    /// The safetensors files; [`TensorRef::file`] is an index into them.
    pub fn files(&self) -> impl ExactSizeIterator<Item = &Path> {
        self.shards.files.iter().map(|shard| shard.path.as_path())
    }

    /// Names of all tensors in the files, sorted, also those that are ignored ([`crate::Ignored`]).
    #[must_use]
    pub fn tensor_names(&self) -> Vec<&str> {
        self.shards.names()
    }

    /// A tensor by its name, if it is there and has one of the types that weights have.
    #[must_use]
    pub fn tensor(&self, name: &str) -> Option<TensorRef> {
        self.shards.tensor(name)
    }

    /// The embedding: [vocabulary, hidden].
    #[must_use]
    pub fn embedding(&self) -> &TensorRef {
        &self.layout.embedding
    }

    /// The embedding of positions, where they are learned: [context, hidden].
    #[must_use]
    pub fn positions(&self) -> Option<&TensorRef> {
        self.layout.positions.as_ref()
    }

    /// The head: [vocabulary, hidden]. The embedding itself where the two are tied and stored once.
    #[must_use]
    pub fn head(&self) -> &TensorRef {
        &self.layout.head
    }

    /// Reports if head and embedding are one tensor on disk: it needs to be loaded only once.
    #[must_use]
    pub fn head_is_embedding(&self) -> bool {
        self.layout.head.name == self.layout.embedding.name
    }

    /// The head's bias, where it has one: [vocabulary].
    #[must_use]
    pub fn head_bias(&self) -> Option<&TensorRef> {
        self.layout.head_bias.as_ref()
    }

    /// The norm before the head.
    #[must_use]
    pub fn final_norm(&self) -> &Linear {
        &self.layout.final_norm
    }

    /// The norms of a layer.
    ///
    /// # Errors
    /// A layer that the model does not have.
    pub fn norms(&self, layer: usize) -> Result<&NormTensors, CheckpointError> {
        self.layer(layer).map(|tensors| &tensors.norms)
    }

    /// The attention of a layer.
    ///
    /// # Errors
    /// A layer that the model does not have.
    pub fn attention(&self, layer: usize) -> Result<&AttentionTensors, CheckpointError> {
        self.layer(layer).map(|tensors| &tensors.attention)
    }

    /// The MLP of a dense layer, `None` where the layer has routed experts.
    ///
    /// # Errors
    /// A layer that the model does not have.
    pub fn dense(&self, layer: usize) -> Result<Option<&MlpTensors>, CheckpointError> {
        Ok(match &self.layer(layer)?.mlp {
            LayerMlp::Dense(mlp) => Some(mlp),
            LayerMlp::Moe { .. } => None,
        })
    }

    /// The router of a layer, `None` where the layer is dense.
    ///
    /// # Errors
    /// A layer that the model does not have.
    pub fn router(&self, layer: usize) -> Result<Option<&RouterTensors>, CheckpointError> {
        Ok(match &self.layer(layer)?.mlp {
            LayerMlp::Moe { router, .. } => Some(router),
            LayerMlp::Dense(_) => None,
        })
    }

    /// The shared experts of a layer, `None` where it has none.
    ///
    /// # Errors
    /// A layer that the model does not have.
    pub fn shared(&self, layer: usize) -> Result<Option<&SharedTensors>, CheckpointError> {
        Ok(match &self.layer(layer)?.mlp {
            LayerMlp::Moe { shared, .. } => shared.as_ref(),
            LayerMlp::Dense(_) => None,
        })
    }

    /// Returns the bias that a layer adds once to the sum of its routed experts, where it has one: [hidden].
    ///
    /// # Errors
    /// A layer that the model does not have.
    pub fn experts_bias(&self, layer: usize) -> Result<Option<&TensorRef>, CheckpointError> {
        Ok(match &self.layer(layer)?.mlp {
            LayerMlp::Moe { bias, .. } => bias.as_ref(),
            LayerMlp::Dense(_) => None,
        })
    }

    /// One routed expert, whichever way the experts are stored.
    ///
    /// # Errors
    /// A layer or expert that the model does not have.
    pub fn expert(&self, layer: usize, expert: usize) -> Result<ExpertTensors, CheckpointError> {
        let LayerMlp::Moe { experts, .. } = &self.layer(layer)?.mlp else {
            return Err(self.request(format!("layer {layer} is dense, it has no routed experts")));
        };
        experts.get(expert).ok_or_else(|| {
            self.request(format!("layer {layer} has no expert {expert}, it has {}", experts.len()))
        })
    }

    /// Reads a whole tensor, all elements of its byte range, as elements of its dtype.
    ///
    /// # Errors
    /// The file cannot be read or has become shorter, or what is stored in a shorter form is not finite.
    pub fn read(&self, tensor: &TensorRef) -> Result<Vec<u8>, CheckpointError> {
        let mut bytes = Vec::new();
        self.read_rows(tensor, 0..tensor.stored_rows(), &mut bytes)?;
        Ok(bytes)
    }

    /// Reads some of the rows that a tensor's byte range has, as elements of its dtype, into `target`, which
    /// is overwritten.
    ///
    /// # Errors
    /// The rows are not in the tensor, or as of [`Self::read`].
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
        target.resize(self.memory(tensor, range.end - range.start)?, 0);
        self.read_into(tensor, range, target)
    }

    fn decode_rows(
        &self,
        tensor: &TensorRef,
        rows: Range<usize>,
        target: &mut Vec<u8>,
    ) -> Result<(), CheckpointError> {
        let range = tensor.row_range(&rows);
        let columns = tensor.stored_columns();
        let mut codes = vec![0; self.memory(tensor, range.end - range.start)?];
        self.read_into(tensor, range, &mut codes)?;
        target.clear();
        target.reserve(self.memory(tensor, rows.len() as u64 * columns as u64 * tensor.dtype.bytes())?);
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

    /// The error of an element, whose row is one of those from `first` on.
    fn not_finite(&self, tensor: &TensorRef, first: usize, place: &NotFinite) -> CheckpointError {
        let NotFinite { row, column, why } = place;
        let path = self.shards.files.get(tensor.file).map_or(self.store.root(), |shard| &shard.path);
        CheckpointError::tensor(path, &tensor.name, format!("element [{}, {column}]: {why}", first + row))
    }

    /// Some of the rows of a matrix that is stored as fp8, as codes, into `target`, which is overwritten.
    ///
    /// # Errors
    /// The rows are not in the tensor, the file cannot be read, or a code is no number.
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
        target.resize(self.memory(tensor, range.end - range.start)?, 0);
        self.read_into(tensor, range, target)?;
        match decode::no_number(target) {
            None => Ok(()),
            Some((at, why)) => {
                let columns = tensor.stored_columns().max(1);
                let place = NotFinite { row: at / columns, column: at % columns, why };
                Err(self.not_finite(tensor, rows.start, &place))
            }
        }
    }

    /// The scales of a matrix that is stored as fp8, row after row of blocks, and the rows and columns of a block;
    /// `None` where it is stored otherwise.
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

    /// Checks that routed experts can be kept as `experts` where the model computes in `dtype`.
    ///
    /// # Errors
    /// [`ExpertsDtype::Fp8`] is asked for, and experts are stored otherwise, in blocks that kernels do not compute
    /// from, or in a narrower type than `dtype`, to which their products with scales are rounded when they are decoded.
    pub fn check_experts_dtype(
        &self,
        experts: Option<ExpertsDtype>,
        dtype: StoredDtype,
    ) -> Result<(), CheckpointError> {
        if experts != Some(ExpertsDtype::Fp8) {
            return Ok(());
        }
        let refused = |why: String| {
            let path = self.store.root().join("config.json");
            let message = format!("--experts-dtype fp8 requires experts stored as fp8: {why}");
            Err(CheckpointError::unsupported(&path, "quantization_config", message))
        };
        if dtype == StoredDtype::F32 && self.config.dtype != StoredDtype::F32 {
            let stored = self.config.dtype.name();
            return refused(format!(
                "these decode to {stored}, which must be the compute dtype; set --dtype {stored}"
            ));
        }
        for layer in self.config.moe_layers() {
            for tensor in self.expert(layer, 0)?.tensors().filter(|tensor| tensor.shape.len() == 2) {
                match (&tensor.stored, tensor.strides) {
                    (StoredAs::Fp8 { block: [height, width], .. }, None)
                        if height.is_multiple_of(4) && width.is_multiple_of(32) => {}
                    (StoredAs::Fp8 { block: [height, width], .. }, None) => {
                        return refused(format!(
                            "unsupported fp8 block {height} x {width}, expected multiples of 4 x 32; omit the flag to \
                             decode the experts"
                        ));
                    }
                    _ => {
                        let name = &tensor.name;
                        return refused(format!(
                            "`{name}` is stored otherwise; use int8, which takes as much memory"
                        ));
                    }
                }
            }
        }
        Ok(())
    }

    /// Rows of scales, each of so many bytes.
    fn read_scales(
        &self,
        scales: &Scales,
        rows: &Range<usize>,
        row_bytes: usize,
    ) -> Result<Vec<u8>, CheckpointError> {
        let mut bytes = vec![0; rows.len() * row_bytes];
        let range = (rows.start * row_bytes) as u64..(rows.end * row_bytes) as u64;
        let place = TensorLocation {
            name: &scales.name,
            file: scales.file,
            offset: scales.offset,
            bytes: scales.bytes,
        };
        self.shards.read(place, range, &mut bytes)?;
        Ok(bytes)
    }

    fn memory(&self, tensor: &TensorRef, bytes: u64) -> Result<usize, CheckpointError> {
        usize::try_from(bytes)
            .map_err(|_| self.request(format!("`{}` does not fit into memory", tensor.name)))
    }

    /// Reads the bytes `range` of a tensor as they are stored into `target`, which has the length of the range.
    ///
    /// # Errors
    /// The range is not inside the tensor, the lengths differ, or the file cannot be read or has
    /// become shorter.
    pub fn read_into(
        &self,
        tensor: &TensorRef,
        range: Range<u64>,
        target: &mut [u8],
    ) -> Result<(), CheckpointError> {
        let place = TensorLocation {
            name: &tensor.name,
            file: tensor.file,
            offset: tensor.offset,
            bytes: tensor.bytes,
        };
        self.shards.read(place, range, target)
    }

    /// Brings tensors near that will be read, where the store fetches them from afar.
    ///
    /// # Errors
    /// They cannot be had.
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

    /// Every tensor of the model outside of the routed experts; tied ones may be named twice.
    #[must_use]
    pub fn outside_tensors(&self) -> Vec<&TensorRef> {
        self.layout.outside()
    }

    /// Returns the sizes of the model's parts at rest.
    #[must_use]
    pub fn sizes(&self) -> Sizes {
        Sizes::of(&self.config, &self.layout)
    }

    /// Returns the output of `remoe inspect`.
    ///
    /// # Errors
    /// As [`Self::fingerprint`].
    pub fn inspect(&self) -> Result<Inspection, CheckpointError> {
        let decoded = self.short_form.map(|form| (form, Sizes::decoded(&self.config, &self.layout)));
        Ok(Inspection::of(&self.config, self.sizes(), decoded, self.fingerprint()?, &self.layout.ignored))
    }

    /// Identity of the weights and of what the config says about them; see [`Fingerprint`].
    ///
    /// # Errors
    /// A file cannot be read or has become shorter.
    pub fn fingerprint(&self) -> Result<Fingerprint, CheckpointError> {
        fingerprint::of(&self.config, self.short_form, &*self.store, &self.shards)
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
