//! Similar Prompts Searching and its relatives: the shares of similar past prompts, weighted.

use crate::divergence;
use crate::embedding::Embedding;
use crate::error::PredictError;
use crate::history::{Experience, History};
use crate::phase::{ByPhase, Phase};
use crate::predictor::Predictor;
use crate::record::ActivationRecord;
use crate::shares::Shares;
use crate::tree::{self, Clustering, Effort, Neighbour, Tree, TreeOptions};
use crate::vector::{add_scaled, dot};
use std::sync::Arc;

/// The softmax of the paper, without a temperature.
pub const UNTEMPERED: f32 = 1.0;
/// Temperatures that are fitted lie between these: similarities crowd within a few hundredths.
const TEMPERATURES: (f64, f64) = (1e-3, 10.0);
/// Steps of the golden-section search over the logarithm of the temperature.
const STEPS: usize = 24;

/// How similar prompts are found.
#[derive(Debug, Clone)]
pub enum Index {
    /// Through a clustering tree.
    Tree(Box<Tree>),
    /// By comparing with all (BF).
    Exhaustive,
    /// By comparing with so many, evenly over all: where there are more it misses some, and takes no longer.
    Sampled(usize),
}

/// Where a new request is kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Learned {
    /// Slot of the request, which may be that of one that left.
    pub slot: u32,
    /// The slots of those that left for it.
    pub left: Vec<u32>,
}

/// A predictor that leans on the most similar past prompts: SPS, VarPAM, VarED, BF.
#[derive(Debug, Clone)]
pub struct SimilarPrompts {
    name: &'static str,
    embedding: Embedding,
    history: Arc<History>,
    index: Index,
    alpha: usize,
    temperature: ByPhase<f32>,
}

impl SimilarPrompts {
    /// Over a tree that is built here, and a copy of `history` that is arranged by its leaves.
    ///
    /// # Errors
    /// The history is empty, or the options are wrong.
    pub fn with_tree(
        name: &'static str,
        embedding: Embedding,
        history: &History,
        clustering: Clustering,
        options: TreeOptions,
        alpha: usize,
    ) -> Result<Self, PredictError> {
        let mut tree = Tree::build(history, clustering, options, alpha)?;
        let history = Arc::new(tree.arrange(history)?);
        Self::new(name, embedding, history, Index::Tree(Box::new(tree)), alpha)
    }

    /// Over an index that is there, with the untempered softmax.
    ///
    /// # Errors
    /// The history is empty, `alpha` is 0, or the embedding is of another model than the history.
    pub fn new(
        name: &'static str,
        embedding: Embedding,
        history: Arc<History>,
        index: Index,
        alpha: usize,
    ) -> Result<Self, PredictError> {
        if history.is_empty() {
            return Err(PredictError::History { records: 0, needed: 1 });
        }
        match &index {
            Index::Tree(tree) => tree.options().check(alpha)?,
            Index::Exhaustive | Index::Sampled(_) if alpha == 0 => {
                return Err(PredictError::option("alpha", alpha, "expected 1 or more"));
            }
            Index::Exhaustive | Index::Sampled(_) => {}
        }
        PredictError::require_size("a row of the embedding", history.vectors.width(), embedding.hidden())?;
        Ok(Self { name, embedding, history, index, alpha, temperature: ByPhase::both(UNTEMPERED) })
    }

    /// Over one request, by comparing with all, up to `most` of them: the beginning of a history that grows by
    /// [`Self::learn_from`].
    ///
    /// # Errors
    /// `alpha` is 0, or the embedding is of another model.
    pub fn begin(
        name: &'static str,
        embedding: Embedding,
        first: &Experience,
        alpha: usize,
        most: usize,
    ) -> Result<Self, PredictError> {
        Self::new(name, embedding, Arc::new(History::of_one(first)), Index::Sampled(most), alpha)
    }

    /// Finds its prompts by `index` from now on.
    pub(crate) fn with_index(&mut self, index: Index) {
        self.index = index;
    }

    /// With a temperature for each phase and another name.
    #[must_use]
    pub fn tempered(&self, name: &'static str, temperature: ByPhase<f32>) -> Self {
        Self { name, temperature, ..self.clone() }
    }

    /// The prompts it leans on.
    #[must_use]
    pub fn history(&self) -> &Arc<History> {
        &self.history
    }

    /// Reports if prompts are compared by the paper's similarity, every token counting alike.
    #[must_use]
    pub fn embedding_is_plain(&self) -> bool {
        !self.embedding.is_weighted()
    }

    /// How they are found.
    #[must_use]
    pub fn index(&self) -> &Index {
        &self.index
    }

    /// Prompts per prediction.
    #[must_use]
    pub fn alpha(&self) -> usize {
        self.alpha
    }

    /// Temperature of the softmax in each phase.
    #[must_use]
    pub fn temperature(&self) -> ByPhase<f32> {
        self.temperature
    }

    /// The past prompts that a prediction leans on, best first.
    ///
    /// # Errors
    /// As [`Predictor::predict`].
    pub fn neighbours(&self, prompt: &[u32]) -> Result<Vec<Neighbour>, PredictError> {
        Ok(self.neighbours_of(&self.embedding.prompt_vector(prompt)?))
    }

    fn neighbours_of(&self, query: &[f32]) -> Vec<Neighbour> {
        self.search_counted(query).0
    }

    fn search_counted(&self, query: &[f32]) -> (Vec<Neighbour>, Effort) {
        match &self.index {
            Index::Tree(tree) => tree.search_counted(&self.history, query, self.alpha),
            Index::Exhaustive => tree::sampled(&self.history, query, self.alpha, usize::MAX),
            Index::Sampled(most) => tree::sampled(&self.history, query, self.alpha, *most),
        }
    }

    /// Returns the effort of a prediction for a prompt with this vector.
    #[must_use]
    pub fn effort(&self, vector: &[f32]) -> Effort {
        self.search_counted(vector).1
    }

    /// Steps from the root of the tree to the leaf of `slot`; 0 where there is no tree.
    #[must_use]
    pub fn depth_of(&self, slot: u32) -> usize {
        match &self.index {
            Index::Tree(tree) => tree.depth_of(slot),
            Index::Exhaustive | Index::Sampled(_) => 0,
        }
    }

    /// The predicted shares of both phases of the request whose prompt has this vector.
    ///
    /// # Errors
    /// The vector is of another model.
    pub fn predict_by_vector(&self, vector: &[f32]) -> Result<ByPhase<Shares>, PredictError> {
        PredictError::require_size("a prompt's vector", self.embedding.hidden(), vector.len())?;
        let neighbours = self.neighbours_of(vector);
        ByPhase::try_each(|phase| mix(&self.history, &neighbours, &self.weights(&neighbours, phase), phase))
    }

    /// The weight of each neighbour: the softmax of similarity / temperature.
    #[must_use]
    pub fn weights(&self, neighbours: &[Neighbour], phase: Phase) -> Vec<f32> {
        softmax(neighbours, *self.temperature.of(phase))
    }

    /// Chooses the temperature that predicts a phase of `held_out` best, by golden-section search; the mean
    /// Jensen-Shannon divergence is what is lowered. None of `held_out` may be in the history.
    ///
    /// # Errors
    /// A record does not belong to this model.
    pub fn fit_temperature(
        &mut self,
        held_out: &[ActivationRecord],
        phase: Phase,
    ) -> Result<(), PredictError> {
        let mut cases = Vec::with_capacity(held_out.len());
        for record in held_out {
            if let Some(truth) = self.history.shares_of(record, phase)? {
                cases.push((self.neighbours(&record.prompt)?, truth));
            }
        }
        if cases.is_empty() {
            return Ok(());
        }
        let error = |temperature: f32| {
            let errors = cases.iter().map(|(neighbours, truth)| {
                let weights = softmax(neighbours, temperature);
                Ok(divergence::mean(&mix(&self.history, neighbours, &weights, phase)?, truth))
            });
            errors.sum()
        };
        *self.temperature.of_mut(phase) = best_temperature(error)?;
        Ok(())
    }

    /// Takes a new record in without a rebuild. With `capacity` prompts kept already, the most redundant
    /// of those near the new one leaves first.
    ///
    /// Redundancy is `FineMoE`'s (section 4.4, its RDY): `semantic` times the similarity of the prompts
    /// plus (1 - `semantic`) times the cosine of the activations; there `semantic` is the prefetch
    /// distance over the number of layers. What leaves is the old prompt most redundant with the new one.
    ///
    /// # Errors
    /// The record does not belong to this model, or `capacity` is 0.
    pub fn learn(
        &mut self,
        record: &ActivationRecord,
        capacity: usize,
        semantic: f32,
    ) -> Result<(), PredictError> {
        let vector = self.embedding.prompt_vector(&record.prompt)?;
        let Some(prefill) = self.history.shares_of(record, Phase::Prefill)? else { return Ok(()) };
        let decode = self.history.shares_of(record, Phase::Decode)?;
        self.take_in(&record.prompt, &Experience { vector, prefill, decode }, capacity, semantic)?;
        Ok(())
    }

    /// As [`Self::learn`], from a request whose prompt is not kept. Says where it is now, and which slots those that
    /// left were in.
    ///
    /// # Errors
    /// It is of another model, or `capacity` is 0.
    pub fn learn_from(
        &mut self,
        experience: &Experience,
        capacity: usize,
        semantic: f32,
    ) -> Result<Learned, PredictError> {
        PredictError::require_size("a prompt's vector", self.embedding.hidden(), experience.vector.len())?;
        let cells = self.history.layers() * self.history.experts();
        for shares in [Some(&experience.prefill), experience.decode.as_ref()].into_iter().flatten() {
            PredictError::require_size("a matrix of shares", cells, shares.values().len())?;
        }
        self.take_in(&[], experience, capacity, semantic)
    }

    fn take_in(
        &mut self,
        prompt: &[u32],
        Experience { vector, prefill: shares, decode }: &Experience,
        capacity: usize,
        semantic: f32,
    ) -> Result<Learned, PredictError> {
        if capacity == 0 {
            return Err(PredictError::option("capacity", capacity, "expected 1 or more"));
        }
        let mut left = Vec::new();
        while self.history.len() >= capacity {
            let slots = match &self.index {
                Index::Tree(tree) => tree.candidates(vector, self.alpha).slots,
                Index::Exhaustive => self.history.slots().collect(),
                Index::Sampled(most) => self.history.sampled_slots(*most).collect(),
            };
            let redundancy = |slot: u32| {
                let row = self.history.share_row(slot, Phase::Prefill);
                let norms = (dot(row, row) * dot(shares.values(), shares.values())).sqrt();
                let activations = dot(row, shares.values()) / norms.max(f32::MIN_POSITIVE);
                semantic * dot(self.history.vector(slot), vector) + (1.0 - semantic) * activations
            };
            let scored = slots.into_iter().map(|slot| (redundancy(slot), slot));
            // Of equally redundant ones the oldest slot goes.
            let Some((_, slot)) = scored.min_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1))) else {
                break;
            };
            self.forget(slot);
            left.push(slot);
        }
        let history = Arc::make_mut(&mut self.history);
        let slot = history.insert(prompt, vector, shares, decode.as_ref());
        if let Index::Tree(tree) = &mut self.index {
            tree.insert(history, slot);
        }
        Ok(Learned { slot, left })
    }

    /// Lets the prompt in a slot go.
    pub fn forget(&mut self, slot: u32) {
        if let Index::Tree(tree) = &mut self.index {
            tree.remove(slot);
        }
        Arc::make_mut(&mut self.history).remove(slot);
    }
}

impl Predictor for SimilarPrompts {
    fn name(&self) -> &'static str {
        self.name
    }

    fn predict(&self, prompt: &[u32], phase: Phase) -> Result<Shares, PredictError> {
        let neighbours = self.neighbours(prompt)?;
        mix(&self.history, &neighbours, &self.weights(&neighbours, phase), phase)
    }

    fn bytes(&self) -> u64 {
        let index = match &self.index {
            Index::Tree(tree) => tree.bytes(),
            Index::Exhaustive | Index::Sampled(_) => 0,
        };
        self.history.bytes() + index
    }
}

/// Returns the temperature with the least `error`, by golden-section search over its logarithm.
pub(crate) fn best_temperature(
    error: impl Fn(f32) -> Result<f64, PredictError>,
) -> Result<f32, PredictError> {
    let error = |log: f64| error(log.exp() as f32);
    let inverse_phi = (5.0_f64.sqrt() - 1.0) / 2.0;
    let (mut low, mut high) = (TEMPERATURES.0.ln(), TEMPERATURES.1.ln());
    let (mut a, mut b) = (high - inverse_phi * (high - low), low + inverse_phi * (high - low));
    let (mut error_a, mut error_b) = (error(a)?, error(b)?);
    for _ in 0..STEPS {
        if error_a < error_b {
            (high, b, error_b) = (b, a, error_a);
            a = high - inverse_phi * (high - low);
            error_a = error(a)?;
        } else {
            (low, a, error_a) = (a, b, error_b);
            b = low + inverse_phi * (high - low);
            error_b = error(b)?;
        }
    }
    Ok(((low + high) / 2.0).exp() as f32)
}

/// Softmax of similarity / temperature.
pub(crate) fn softmax(neighbours: &[Neighbour], temperature: f32) -> Vec<f32> {
    let best = neighbours.iter().map(|neighbour| neighbour.similarity).fold(f32::NEG_INFINITY, f32::max);
    let raised: Vec<f32> =
        neighbours.iter().map(|neighbour| ((neighbour.similarity - best) / temperature).exp()).collect();
    let sum: f32 = raised.iter().sum();
    raised.into_iter().map(|value| value / sum).collect()
}

/// The weighted sum of the neighbours' shares.
fn mix(
    history: &History,
    neighbours: &[Neighbour],
    weights: &[f32],
    phase: Phase,
) -> Result<Shares, PredictError> {
    let mut sum = vec![0.0; history.layers() * history.experts()];
    for (neighbour, &weight) in neighbours.iter().zip(weights) {
        add_scaled(&mut sum, weight, history.share_row(neighbour.slot, phase));
    }
    Shares::from_weights(history.experts(), sum)
}
