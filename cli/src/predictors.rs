//! Reading of saved predictors and activation records.

use crate::exit::{CliError, CliExitCode};
use crate::output::progress;
use remoe_hub::ModelArgs;
use remoe_model::{Checkpoint, CheckpointError, StoredDtype, TensorRef};
use remoe_predictor::record::{ActivationRecord, RecordError, RecordHeader, RecordReader};
use remoe_predictor::{
    Embedding, EmbeddingType, Fate, GateWeights, PREDICTOR_FILE, PredictError, TrainedPredictor,
};
use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Checkpoint with the data that predictors need.
pub(crate) struct PredictorModel {
    pub(crate) checkpoint: Arc<Checkpoint>,
    pub(crate) embedding: Embedding,
    /// Fingerprint of the checkpoint.
    pub(crate) fingerprint: String,
}

impl PredictorModel {
    /// Opens a checkpoint, and reads its embedding.
    pub(crate) fn open(source: &ModelArgs) -> Result<Self, CliError> {
        Self::of(Arc::new(source.open()?.checkpoint))
    }

    /// Reads the embedding of an open checkpoint.
    pub(crate) fn of(checkpoint: Arc<Checkpoint>) -> Result<Self, CliError> {
        if checkpoint.config().moe_layers().is_empty() {
            return Err(CliError::arguments("--model", "invalid --model: no layer with routed experts"));
        }
        let tensor = checkpoint.embedding();
        let rows = checkpoint.read(tensor)?;
        let embedding = Embedding::new(checkpoint.config().hidden_size, element_type(tensor), rows.into())?;
        let fingerprint = checkpoint.fingerprint()?.to_string();
        Ok(Self { checkpoint, embedding, fingerprint })
    }

    /// Reads the predictor of this model that `remoe predictor build` saved in `folder`.
    pub(crate) fn saved_predictor(&self, folder: &Path) -> Result<TrainedPredictor, CliError> {
        let path = folder.join(PREDICTOR_FILE);
        let failed = |message: String| CliError {
            path: Some(path.clone()),
            ..CliError::arguments("--predictor", format!("{}: {message}", path.display()))
        };
        let bytes =
            std::fs::read(&path).map_err(|error| failed(format!("{error}; run `remoe predictor build`")))?;
        TrainedPredictor::from_bytes(&bytes.into(), &self.fingerprint, &self.embedding)
            .map_err(|error| failed(error.to_string()))
    }

    /// Reads the predictor in `folder`, else the one in the checkpoint's folder, if any.
    pub(crate) fn predictor_of(
        checkpoint: &Arc<Checkpoint>,
        folder: Option<&Path>,
    ) -> Result<Option<TrainedPredictor>, CliError> {
        match predictor_folder(checkpoint, folder) {
            Some(folder) => Ok(Some(Self::of(Arc::clone(checkpoint))?.saved_predictor(&folder)?)),
            None => Ok(None),
        }
    }

    /// Reads the predictor in `folder`, else the one in the model's folder, if any.
    pub(crate) fn predictor(&self, folder: Option<&Path>) -> Result<Option<TrainedPredictor>, CliError> {
        let folder = predictor_folder(&self.checkpoint, folder);
        folder.map(|folder| self.saved_predictor(&folder)).transpose()
    }

    /// Builds the Fate-style baseline predictor from the norms and routers.
    pub(crate) fn fate(&self) -> Result<Fate, CliError> {
        let config = self.checkpoint.config();
        let mut layers = Vec::new();
        let (mut experts, mut top_k) = (0, 0);
        for layer in config.moe_layers() {
            let (Some(facts), Some(router)) = (config.moe(layer), self.checkpoint.router(layer)?) else {
                continue;
            };
            (experts, top_k) = (facts.experts, facts.top_k);
            let norm = self.floats(&self.checkpoint.norms(layer)?.mlp.weight)?;
            layers.push(GateWeights { norm, gate: self.floats(&router.linear.weight)? });
        }
        Ok(Fate::new(self.embedding.clone(), layers, experts, top_k, config.norm_eps as f32)?)
    }

    fn floats(&self, tensor: &TensorRef) -> Result<Vec<f32>, CheckpointError> {
        Ok(element_type(tensor).floats(&self.checkpoint.read(tensor)?))
    }

    /// Reads the records of a file, without the experts of single tokens. Skips damaged records with a warning.
    ///
    /// # Errors
    /// The file cannot be read, or is of another model.
    pub(crate) fn records(
        &self,
        flag: &str,
        path: &Path,
    ) -> Result<(RecordHeader, Vec<ActivationRecord>), CliError> {
        let file_error = |error: RecordError| CliError::record_file(flag, path, &error);
        let file = File::open(path).map_err(|error| file_error(error.into()))?;
        let mut reader = RecordReader::new(BufReader::new(file)).map_err(file_error)?;
        let mut header = reader.header().clone();
        self.expected_header(&header).require_same(&header).map_err(file_error)?;
        let without_tokens = |record: Result<ActivationRecord, _>| {
            record.map(|record| ActivationRecord { experts: None, ..record })
        };
        let records =
            reader.by_ref().map(without_tokens).collect::<Result<Vec<_>, _>>().map_err(file_error)?;
        for damage in reader.damage() {
            progress::print_warning(&format!("{}: {damage}", path.display()));
        }
        header.tokens = false;
        Ok((header, records))
    }

    /// Returns the header that records of this model must have. Fields that the model does not determine are from `found`.
    fn expected_header(&self, found: &RecordHeader) -> RecordHeader {
        let config = self.checkpoint.config();
        let layers = config.moe_layers();
        let moe = layers.first().and_then(|&layer| config.moe(layer));
        RecordHeader {
            model: self.fingerprint.clone(),
            layers: layers.iter().map(|&layer| layer as u32).collect(),
            experts: moe.map_or(0, |moe| moe.experts as u32),
            top_k: moe.map_or(0, |moe| moe.top_k as u32),
            ..found.clone()
        }
    }
}

/// Returns `folder`, else the folder `predictor` in the model's folder if it exists.
fn predictor_folder(checkpoint: &Checkpoint, folder: Option<&Path>) -> Option<PathBuf> {
    // For a remote model, the root is not a local path, and the folder does not exist.
    let in_model = || Some(checkpoint.store().root().join("predictor")).filter(|folder| folder.is_dir());
    folder.map(Path::to_owned).or_else(in_model)
}

fn element_type(tensor: &TensorRef) -> EmbeddingType {
    match tensor.dtype {
        StoredDtype::F32 => EmbeddingType::F32,
        StoredDtype::Bf16 => EmbeddingType::Bf16,
        StoredDtype::F16 => EmbeddingType::F16,
    }
}

impl CliError {
    /// Converts an error about the record file that `flag` names.
    fn record_file(flag: &str, path: &Path, error: &RecordError) -> Self {
        let message = format!("{}: {error}", path.display());
        Self { path: Some(path.to_owned()), ..Self::arguments(flag, message) }
    }
}

impl From<PredictError> for CliError {
    fn from(error: PredictError) -> Self {
        match &error {
            PredictError::Option { option, .. } => Self::arguments(&format!("--{option}"), error.to_string()),
            PredictError::EmptyPrompt | PredictError::Token { .. } => {
                Self::arguments("--prompt", error.to_string())
            }
            PredictError::NotFinite { .. } => {
                Self { code: CliExitCode::Checkpoint, ..Self::runtime(error.to_string()) }
            }
            _ => Self::runtime(error.to_string()),
        }
    }
}
