//! Training history: past prompts and their expert usage.

use crate::embedding::Embedding;
use crate::error::PredictError;
use crate::phase::{ByPhase, Phase};
use crate::record::ActivationRecord;
use crate::rows::Rows;
use crate::shares::UsageShares;
use rayon::prelude::*;

/// Expert usage of one past request, with the vector of its prompt and without its text.
#[derive(Debug, Clone, PartialEq)]
pub struct UsageSample {
    /// Vector of the prompt, by [`Embedding::prompt_vector`].
    pub vector: Vec<f32>,
    /// Shares of the prefill.
    pub prefill: UsageShares,
    /// Shares of the decode steps, if there were any.
    pub decode: Option<UsageShares>,
}

/// Past prompts, each in a slot with its vector, its shares in both phases and its tokens.
///
/// The next prompt reuses a freed slot.
#[derive(Debug, Clone)]
pub struct History {
    layers: usize,
    experts: usize,
    /// [slots, hidden], unit rows.
    pub(crate) vectors: Rows,
    /// Shares of the prefill, [slots, layers x experts].
    pub(crate) shares: Rows,
    /// Shares of the decode steps, [slots, layers x experts]. Absent until a request has decode steps.
    pub(crate) decode: Option<Rows>,
    /// Token ids of each slot's prompt, empty if they are not kept. `None` for a free slot.
    prompts: Vec<Option<Box<[u32]>>>,
    free_slots: Vec<u32>,
}

impl History {
    /// Creates a history with one slot per record, in the order of `records`. Without decode steps, the shares of the
    /// prefill stand for them.
    ///
    /// # Errors
    /// A record is not of `layers` x `experts`, has an empty prompt, or a token beyond the vocabulary.
    pub fn from_records(
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
            free_slots: Vec::new(),
        };
        let vectors = records.par_iter().map(|record| embedding.prompt_vector(&record.prompt));
        let vectors = vectors.collect::<Result<Vec<_>, _>>()?;
        let shares_of_phase = |phase| {
            records.iter().map(|record| history.shares_of(record, phase)).collect::<Result<Vec<_>, _>>()
        };
        let ByPhase { prefill, decode } = ByPhase::try_each(shares_of_phase)?;
        let row = |shares: &Option<UsageShares>, fallback: &Option<UsageShares>| {
            shares.as_ref().or(fallback.as_ref()).map_or(Vec::new(), |shares| shares.values().to_vec())
        };
        let rows = |phase: &[Option<UsageShares>]| {
            let rows = phase.iter().zip(&prefill).flat_map(|(shares, prefill)| row(shares, prefill));
            Rows::from_values(layers * experts, rows.collect())
        };
        history.shares = rows(&prefill);
        history.decode = decode.iter().any(Option::is_some).then(|| rows(&decode));
        history.prompts.extend(records.iter().map(|record| Some(record.prompt.clone().into_boxed_slice())));
        history.vectors = Rows::from_values(embedding.hidden(), vectors.concat());
        Ok(history)
    }

    /// Creates a history of one request without its tokens.
    pub(crate) fn from_request(experience: &UsageSample) -> Self {
        let UsageSample { vector, prefill, decode } = experience;
        let mut history = Self {
            layers: prefill.layers(),
            experts: prefill.experts(),
            vectors: Rows::new(vector.len()),
            shares: Rows::new(prefill.values().len()),
            decode: None,
            prompts: Vec::new(),
            free_slots: Vec::new(),
        };
        history.insert(&[], vector, prefill, decode.as_ref());
        history
    }

    /// Creates a history from vectors [prompts, hidden], which it scales to length 1, shares of the prefill [prompts,
    /// layers x experts], and the tokens of the prompts.
    ///
    /// # Errors
    /// The numbers of prompts differ, or a prompt is empty.
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

    /// Restores a saved history, in which every slot is in use.
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
        Ok(Self { layers, experts, vectors, shares, decode, prompts, free_slots: Vec::new() })
    }

    /// Returns the shares of a record in a phase. Returns `None` if the request had no decode step.
    ///
    /// # Errors
    /// The record has another shape than this history.
    pub fn shares_of(
        &self,
        record: &ActivationRecord,
        phase: Phase,
    ) -> Result<Option<UsageShares>, PredictError> {
        let Some(counts) = record.counts(phase) else { return Ok(None) };
        PredictError::require_size("the counts of a record", self.layers * self.experts, counts.len())?;
        UsageShares::from_counts(self.experts, counts).map(Some)
    }

    /// Returns true if a request had decode steps.
    #[must_use]
    pub fn has_decode(&self) -> bool {
        self.decode.is_some()
    }

    /// Returns the number of prompts.
    #[must_use]
    pub fn len(&self) -> usize {
        self.prompts.len() - self.free_slots.len()
    }

    /// Returns true if there are no prompts.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the number of layers with experts.
    #[must_use]
    pub fn layers(&self) -> usize {
        self.layers
    }

    /// Returns the number of experts per layer.
    #[must_use]
    pub fn experts(&self) -> usize {
        self.experts
    }

    /// Iterates over the slots in use, ascending.
    pub fn slots(&self) -> impl Iterator<Item = u32> {
        (0..).zip(&self.prompts).filter(|(_, prompt)| prompt.is_some()).map(|(slot, _)| slot)
    }

    /// Iterates over at most `limit` slots in use, ascending and evenly spaced.
    pub(crate) fn sampled_slots(&self, limit: usize) -> impl Iterator<Item = u32> {
        let step = self.prompts.len().div_ceil(limit.max(1)).max(1);
        let slots = (0..).zip(&self.prompts).step_by(step);
        slots.filter(|(_, prompt)| prompt.is_some()).map(|(slot, _)| slot)
    }

    /// Returns the tokens of a slot's prompt. Returns none for a free slot or if tokens are not kept.
    #[must_use]
    pub fn prompt(&self, slot: u32) -> &[u32] {
        self.prompts.get(slot as usize).and_then(Option::as_deref).unwrap_or_default()
    }

    /// Returns the unit vector of a slot's prompt, [hidden].
    #[must_use]
    pub fn vector(&self, slot: u32) -> &[f32] {
        self.vectors.row(slot as usize)
    }

    /// Returns the shares of a slot's request in a phase, [layers x experts]. Without decode steps, the shares of the
    /// prefill stand for them.
    #[must_use]
    pub fn share_row(&self, slot: u32, phase: Phase) -> &[f32] {
        let rows = match phase {
            Phase::Prefill => &self.shares,
            Phase::Decode => self.decode.as_ref().unwrap_or(&self.shares),
        };
        rows.row(slot as usize)
    }

    /// Returns true if a slot is in use.
    pub(crate) fn is_used(&self, slot: u32) -> bool {
        self.prompts.get(slot as usize).is_some_and(Option::is_some)
    }

    /// Returns a copy with the same slots and vectors, without shares and tokens.
    pub(crate) fn vectors_only(&self) -> Self {
        Self {
            layers: self.layers,
            experts: self.experts,
            vectors: self.vectors.clone(),
            shares: Rows::new(self.layers * self.experts),
            decode: None,
            prompts: self.prompts.iter().map(|prompt| prompt.as_ref().map(|_| Box::default())).collect(),
            free_slots: self.free_slots.clone(),
        }
    }

    /// Returns the history of `slots` alone, in that order.
    pub(crate) fn gather(&self, slots: &[u32]) -> Self {
        Self {
            layers: self.layers,
            experts: self.experts,
            vectors: self.vectors.gather(slots),
            shares: self.shares.gather(slots),
            decode: self.decode.as_ref().map(|rows| rows.gather(slots)),
            prompts: slots.iter().map(|&slot| Some(self.prompt(slot).into())).collect(),
            free_slots: Vec::new(),
        }
    }

    /// Adds a prompt and returns its slot. Without shares of decode steps, the prefill's stand for them.
    pub(crate) fn insert(
        &mut self,
        prompt: &[u32],
        vector: &[f32],
        shares: &UsageShares,
        decode: Option<&UsageShares>,
    ) -> u32 {
        let slot = self.free_slots.pop().unwrap_or(self.prompts.len() as u32);
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
            self.free_slots.push(slot);
        }
    }

    /// Returns the memory, in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let tokens: usize = self.prompts.iter().flatten().map(|prompt| prompt.len()).sum();
        let lists = tokens * size_of::<u32>() + self.prompts.len() * size_of::<Option<Box<[u32]>>>();
        let decode = self.decode.as_ref().map_or(0, Rows::bytes);
        self.vectors.bytes() + self.shares.bytes() + decode + lists as u64
    }
}
