//! What is known of a model's requests while `up` serves it.

use super::args::FollowArgs;
use crate::deployment::Wanted;
use crate::exit::CliError;
use crate::flags::default_dtype;
use crate::predictors::Model;
use remoe_gateway_core::{Privacy, Witness};
use remoe_predictor::record::RecordHeader;
use remoe_predictor::{ByPhase, Shares, TunedPredictor};
use remoe_usage::{Foresight, ForesightMetrics, ForesightOptions, Keeps, Mix, Prompts, Watch};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// What a wake waits for the predictions of those that wait, at most. They take less than a millisecond each.
const PREDICTIONS: Duration = Duration::from_millis(250);
/// Requests to go by before a placement follows what is used.
const ENOUGH: f64 = 4.0;

/// Follows the requests of one model.
pub(super) struct Seer {
    watch: Arc<Watch>,
    /// What was used of late, once that is enough to go by.
    pub(super) observed: watch::Receiver<Option<Shares>>,
    /// What those used on average that were remembered at the start, where they are enough to go by.
    pub(super) remembered: Option<Shares>,
}

/// A gateway's end of a [`Watch`].
struct Watching(Arc<Watch>);

impl Witness for Watching {
    fn came(&self, id: u64, tenant: &str, privacy: Privacy, body: &axum::body::Bytes) -> bool {
        let keeps = match privacy {
            Privacy::Shared => Keeps::Shared,
            Privacy::None => Keeps::Records,
            Privacy::CountsOnly => Keeps::Counts,
            Privacy::LeftOut => Keeps::Nothing,
        };
        self.0.came(id, tenant, keeps, body)
    }

    fn told(&self, id: u64, activations: &str) {
        self.0.told(id, activations);
    }

    fn left(&self, id: u64) {
        self.0.left(id);
    }
}

impl Seer {
    /// Begins to follow the requests of `wanted`'s model, whose predictor is in the folder `predictor` or its own; a
    /// typical one has so many `tokens`.
    pub(super) fn open(
        wanted: &Wanted,
        follow: &FollowArgs,
        predictor: Option<&Path>,
        tokens: ByPhase<f64>,
        metrics: &ForesightMetrics,
    ) -> Result<Self, CliError> {
        let model = Model::of(wanted.checkpoint.clone())?;
        let facts = &wanted.inspection;
        let number = |value: usize| u32::try_from(value).unwrap_or(u32::MAX);
        let header = RecordHeader {
            model: model.fingerprint.clone(),
            layers: facts.moe_layers.iter().map(|layer| number(*layer)).collect(),
            experts: number(facts.experts),
            top_k: number(facts.top_k),
            dtype: wanted.options.dtype.clone().unwrap_or_else(|| default_dtype(facts).to_owned()),
            tokens: false,
        };
        let trained = model.predictor(predictor)?;
        // One folder serves for several models.
        let folder = follow.experience.as_ref().map(|folder| folder.join(&model.fingerprint));
        let options = ForesightOptions {
            store: folder.map(|folder| (folder, follow.experience_bytes)),
            forgets: follow.forget,
            output_tokens: tokens.decode,
        };
        let prompts = Prompts::open(&wanted.checkpoint)?;
        let trained = trained.map(|trained| Box::new(trained) as Box<dyn TunedPredictor>);
        let foresight = Foresight::new(header, model.embedding, prompts, trained, options)
            .map_err(|error| CliError::arguments("--experience", error.to_string()))?;
        let is_enough = foresight.remembered().0 as f64 >= ENOUGH;
        let remembered = if is_enough { foresight.mean(tokens)? } else { None };
        let (tell, observed) = watch::channel(None);
        let metrics = metrics.of_model(&wanted.name());
        let watch = Watch::start(foresight, None, move |foresight, _news| {
            metrics.show(foresight);
            let observed = foresight.observed();
            if observed.requests() >= ENOUGH
                && let Ok(mix) = observed.mix()
            {
                tell.send_replace(mix.map(|mix| mix.shares));
            }
        });
        let watch = watch.map_err(|error| CliError::runtime(format!("cannot start a thread: {error}")))?;
        Ok(Self { watch: Arc::new(watch), observed, remembered })
    }

    /// Who is to be told of the model's requests.
    pub(super) fn witness(&self) -> Arc<dyn Witness> {
        Arc::new(Watching(self.watch.clone()))
    }

    /// Who is there.
    pub(super) fn present(&self) -> Present {
        Present(self.watch.clone())
    }

    /// What was used of late, where that is enough to go by.
    pub(super) fn of_late(&self) -> Option<Shares> {
        self.observed.borrow().clone()
    }
}

/// Requests that wait or are worked on.
pub(super) struct Present(Arc<Watch>);

impl Present {
    /// What they will use; none where that is not known.
    pub(super) async fn mix(self) -> Option<Mix> {
        tokio::task::spawn_blocking(move || self.0.mix(PREDICTIONS)).await.ok().flatten()
    }
}
