//! The prompts of the past that predictions lean on.

use crate::embedding::Embedding;
use crate::error::PredictError;
use crate::phase::{ByPhase, Phase};
use crate::record::ActivationRecord;
use crate::rows::Rows;
use crate::shares::Shares;
use rayon::prelude::*;

/// A request of the past as far as predictions need it: nothing of its text.
#[derive(Debug, Clone, PartialEq)]
pub struct Experience {
    /// The vector of its prompt, [`Embedding::prompt_vector`].
    pub vector: Vec<f32>,
    /// Shares of the experts in the prefill.
    pub prefill: Shares,
    /// Shares of the experts in the decode steps, where it had any.
    pub decode: Option<Shares>,
}

/// Past prompts, each in a slot: its vector, its shares in both phases and its tokens.
///
/// A slot that was freed is used again by the next prompt.
#[derive(Debug, Clone)]
pub struct History {
    layers: usize,
    experts: usize,
    /// [slots, hidden], unit rows.
    pub(crate) vectors: Rows,
    /// The shares of the prefill, [slots, layers x experts].
    pub(crate) shares: Rows,
    /// The shares of the decode steps, [slots, layers x experts]; absent as long as no request had any.
    pub(crate) decode: Option<Rows>,
    /// Token ids of each slot's prompt, empty where they are not kept; none where the slot is free.
    prompts: Vec<Option<Box<[u32]>>>,
    free: Vec<u32>,
}

impl History {
    /// One slot per record, in their order. Where a request had no decode steps its prefill stands for them.
    ///
    /// # Errors
    /// A record has another form than `layers` x `experts`, an empty prompt, or a token beyond the
    /// vocabulary.
    pub fn of(
        embedding: &Embedding,
        layers: usize,
        experts: usize,
        records: &[ActivationRecord],
    ) -> Result<Self, PredictError> {
        let mut history = Self {
            layers,
            experts,
            vectors: Rows::new(embedding.hidden()),
            shares: Rows::new(layers * experts),
            decode: None,
            prompts: Vec::with_capacity(records.len()),
            free: Vec::new(),
        };
        let vectors = records.par_iter().map(|record| embedding.prompt_vector(&record.prompt));
        let vectors = vectors.collect::<Result<Vec<_>, _>>()?;
        let of_phase = |phase| {
            records.iter().map(|record| history.shares_of(record, phase)).collect::<Result<Vec<_>, _>>()
        };
        let ByPhase { prefill, decode } = ByPhase::try_each(of_phase)?;
        let row = |shares: &Option<Shares>, other: &Option<Shares>| {
            shares.as_ref().or(other.as_ref()).map_or(Vec::new(), |shares| shares.values().to_vec())
        };
        let rows = |phase: &[Option<Shares>]| {
            let rows = phase.iter().zip(&prefill).flat_map(|(shares, prefill)| row(shares, prefill));
            Rows::from_values(layers * experts, rows.collect())
        };
        history.shares = rows(&prefill);
        history.decode = decode.iter().any(Option::is_some).then(|| rows(&decode));
        history.prompts.extend(records.iter().map(|record| Some(record.prompt.clone().into_boxed_slice())));
        history.vectors = Rows::from_values(embedding.hidden(), vectors.concat());
        Ok(history)
    }

    /// Returns a history of one request, whose prompt is not kept.
    pub(crate) fn of_one(experience: &Experience) -> Self {
        let Experience { vector, prefill, decode } = experience;
        let mut history = Self {
            layers: prefill.layers(),
            experts: prefill.experts(),
            vectors: Rows::new(vector.len()),
            shares: Rows::new(prefill.values().len()),
            decode: None,
            prompts: Vec::new(),
            free: Vec::new(),
        };
        history.insert(&[], vector, prefill, decode.as_ref());
        history
    }

    /// From vectors [prompts, hidden], which are scaled to length 1, shares of the prefill
    /// [prompts, layers x experts] and the prompts' tokens.
    ///
    /// # Errors
    /// They are not of as many prompts, or a prompt is empty.
    pub fn from_vectors(
        layers: usize,
        experts: usize,
        mut vectors: Vec<f32>,
        shares: Vec<f32>,
        prompts: Vec<Box<[u32]>>,
    ) -> Result<Self, PredictError> {
        if prompts.iter().any(|prompt| prompt.is_empty()) {
            return Err(PredictError::EmptyPrompt);
        }
        let hidden = vectors.len() / prompts.len().max(1);
        PredictError::require_size("the matrix of vectors", hidden * prompts.len(), vectors.len())?;
        PredictError::require_size("the matrix of shares", layers * experts * prompts.len(), shares.len())?;
        vectors.par_chunks_mut(hidden.max(1)).for_each(crate::vector::normalise);
        let (vectors, shares) =
            (Rows::from_values(hidden, vectors), Rows::from_values(layers * experts, shares));
        Self::from_parts(layers, experts, vectors, shares, None, prompts)
    }

    /// From what was saved; every slot is in use.
    pub(crate) fn from_parts(
        layers: usize,
        experts: usize,
        vectors: Rows,
        shares: Rows,
        decode: Option<Rows>,
        prompts: Vec<Box<[u32]>>,
    ) -> Result<Self, PredictError> {
        PredictError::require_size("`vectors`", prompts.len(), vectors.len())?;
        for rows in [Some(&shares), decode.as_ref()].into_iter().flatten() {
            PredictError::require_size("`shares`", prompts.len(), rows.len())?;
            PredictError::require_size("a row of `shares`", layers * experts, rows.width())?;
        }
        let prompts = prompts.into_iter().map(Some).collect();
        Ok(Self { layers, experts, vectors, shares, decode, prompts, free: Vec::new() })
    }

    /// The shares that a record shows of a phase; `None` where the request had no decode step.
    ///
    /// # Errors
    /// The record has another form than this history.
    pub fn shares_of(&self, record: &ActivationRecord, phase: Phase) -> Result<Option<Shares>, PredictError> {
        let Some(counts) = record.counts(phase) else { return Ok(None) };
        PredictError::require_size("the counts of a record", self.layers * self.experts, counts.len())?;
        Shares::from_counts(self.experts, counts).map(Some)
    }

    /// Reports if some request in it had decode steps.
    #[must_use]
    pub fn has_decode(&self) -> bool {
        self.decode.is_some()
    }

    /// Prompts that are kept.
    #[must_use]
    pub fn len(&self) -> usize {
        self.prompts.len() - self.free.len()
    }

    /// Reports if no slot is in use.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Layers with experts.
    #[must_use]
    pub fn layers(&self) -> usize {
        self.layers
    }

    /// Experts per layer.
    #[must_use]
    pub fn experts(&self) -> usize {
        self.experts
    }

    /// Slots in use, ascending.
    pub fn slots(&self) -> impl Iterator<Item = u32> {
        (0..).zip(&self.prompts).filter(|(_, prompt)| prompt.is_some()).map(|(slot, _)| slot)
    }

    /// At most `most` slots in use, ascending, evenly over all where there are more.
    pub(crate) fn sampled_slots(&self, most: usize) -> impl Iterator<Item = u32> {
        let step = self.prompts.len().div_ceil(most.max(1)).max(1);
        let slots = (0..).zip(&self.prompts).step_by(step);
        slots.filter(|(_, prompt)| prompt.is_some()).map(|(slot, _)| slot)
    }

    /// Tokens of a slot's prompt; empty where there is none, or they are not kept.
    #[must_use]
    pub fn prompt(&self, slot: u32) -> &[u32] {
        self.prompts.get(slot as usize).and_then(Option::as_deref).unwrap_or_default()
    }

    /// Unit vector of a slot's prompt, [hidden].
    #[must_use]
    pub fn vector(&self, slot: u32) -> &[f32] {
        self.vectors.row(slot as usize)
    }

    /// Shares of a slot's request in a phase, [layers x experts]. Where nothing is known of decode steps, the
    /// prefill's stand for them.
    #[must_use]
    pub fn share_row(&self, slot: u32, phase: Phase) -> &[f32] {
        let rows = match phase {
            Phase::Prefill => &self.shares,
            Phase::Decode => self.decode.as_ref().unwrap_or(&self.shares),
        };
        rows.row(slot as usize)
    }

    /// Reports if a slot is in use.
    pub(crate) fn holds(&self, slot: u32) -> bool {
        self.prompts.get(slot as usize).is_some_and(Option::is_some)
    }

    /// Returns a copy of the vectors in the same slots, without the shares of requests and without tokens.
    pub(crate) fn of_vectors(&self) -> Self {
        Self {
            layers: self.layers,
            experts: self.experts,
            vectors: self.vectors.clone(),
            shares: Rows::new(self.layers * self.experts),
            decode: None,
            prompts: self.prompts.iter().map(|prompt| prompt.as_ref().map(|_| Box::default())).collect(),
            free: self.free.clone(),
        }
    }

    /// The prompts of `slots` alone, in their order.
    pub(crate) fn gather(&self, slots: &[u32]) -> Self {
        Self {
            layers: self.layers,
            experts: self.experts,
            vectors: self.vectors.gather(slots),
            shares: self.shares.gather(slots),
            decode: self.decode.as_ref().map(|rows| rows.gather(slots)),
            prompts: slots.iter().map(|&slot| Some(self.prompt(slot).into())).collect(),
            free: Vec::new(),
        }
    }

    /// Takes a prompt in and returns its slot. Without shares of its decode steps it counts as its prefill there.
    pub(crate) fn insert(
        &mut self,
        prompt: &[u32],
        vector: &[f32],
        shares: &Shares,
        decode: Option<&Shares>,
    ) -> u32 {
        let slot = self.free.pop().unwrap_or(self.prompts.len() as u32);
        let index = slot as usize;
        if index == self.prompts.len() {
            self.prompts.push(None);
        }
        if let Some(target) = self.prompts.get_mut(index) {
            *target = Some(prompt.into());
        }
        self.vectors.set(index, vector);
        if decode.is_some() && self.decode.is_none() {
            self.decode = Some(self.shares.clone());
        }
        self.shares.set(index, shares.values());
        if let Some(rows) = &mut self.decode {
            rows.set(index, decode.unwrap_or(shares).values());
        }
        slot
    }

    /// Frees a slot.
    pub(crate) fn remove(&mut self, slot: u32) {
        if self.prompts.get_mut(slot as usize).and_then(Option::take).is_some() {
            self.free.push(slot);
        }
    }

    /// Memory in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let tokens: usize = self.prompts.iter().flatten().map(|prompt| prompt.len()).sum();
        let lists = tokens * size_of::<u32>() + self.prompts.len() * size_of::<Option<Box<[u32]>>>();
        let decode = self.decode.as_ref().map_or(0, Rows::bytes);
        self.vectors.bytes() + self.shares.bytes() + decode + lists as u64
    }
}
