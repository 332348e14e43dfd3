//! The prompts of the past that predictions lean on.

use crate::embedding::Embedding;
use crate::error::PredictError;
use crate::record::ActivationRecord;
use crate::rows::Rows;
use crate::shares::Shares;
use rayon::prelude::*;

/// Past prompts, each in a slot: its vector, its shares and its tokens.
///
/// A slot that was freed is used again by the next prompt.
#[derive(Debug, Clone)]
pub struct History {
    layers: usize,
    experts: usize,
    /// [slots, hidden], unit rows.
    pub(crate) vectors: Rows,
    /// [slots, layers x experts].
    pub(crate) shares: Rows,
    /// Token ids of each slot's prompt; empty where the slot is free.
    prompts: Vec<Box<[u32]>>,
    free: Vec<u32>,
}

impl History {
    /// One slot per record, in their order.
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
            prompts: Vec::with_capacity(records.len()),
            free: Vec::new(),
        };
        let vectors = records.par_iter().map(|record| embedding.prompt_vector(&record.prompt));
        let vectors = vectors.collect::<Result<Vec<_>, _>>()?;
        let mut shares = Vec::with_capacity(records.len() * layers * experts);
        for record in records {
            shares.extend_from_slice(history.shares_of(record)?.values());
            history.prompts.push(record.prompt.clone().into_boxed_slice());
        }
        history.vectors = Rows::from_values(embedding.hidden(), vectors.concat());
        history.shares = Rows::from_values(layers * experts, shares);
        Ok(history)
    }

    /// From vectors [prompts, hidden], which are scaled to length 1, shares [prompts, layers x experts] and the
    /// prompts' tokens.
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
        Self::from_parts(layers, experts, vectors, shares, prompts)
    }

    /// From what was saved; every slot is in use.
    pub(crate) fn from_parts(
        layers: usize,
        experts: usize,
        vectors: Rows,
        shares: Rows,
        prompts: Vec<Box<[u32]>>,
    ) -> Result<Self, PredictError> {
        PredictError::require_size("`vectors`", prompts.len(), vectors.len())?;
        PredictError::require_size("`shares`", prompts.len(), shares.len())?;
        PredictError::require_size("a row of `shares`", layers * experts, shares.width())?;
        Ok(Self { layers, experts, vectors, shares, prompts, free: Vec::new() })
    }

    /// The shares that a record's prefill shows.
    ///
    /// # Errors
    /// The record has another form than this history.
    pub fn shares_of(&self, record: &ActivationRecord) -> Result<Shares, PredictError> {
        PredictError::require_size(
            "`prefill` of a record",
            self.layers * self.experts,
            record.prefill.len(),
        )?;
        Shares::from_counts(self.experts, &record.prefill)
    }

    /// Prompts that are kept.
    #[must_use]
    pub fn len(&self) -> usize {
        self.prompts.len() - self.free.len()
    }

    /// Whether none is.
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
        (0..).zip(&self.prompts).filter(|(_, prompt)| !prompt.is_empty()).map(|(slot, _)| slot)
    }

    /// Tokens of a slot's prompt; empty where there is none.
    #[must_use]
    pub fn prompt(&self, slot: u32) -> &[u32] {
        self.prompts.get(slot as usize).map_or(&[], |prompt| prompt)
    }

    /// Unit vector of a slot's prompt, [hidden].
    #[must_use]
    pub fn vector(&self, slot: u32) -> &[f32] {
        self.vectors.row(slot as usize)
    }

    /// Shares of a slot's prompt, [layers x experts].
    #[must_use]
    pub fn share_row(&self, slot: u32) -> &[f32] {
        self.shares.row(slot as usize)
    }

    /// The prompts of `slots` alone, in their order.
    pub(crate) fn gather(&self, slots: &[u32]) -> Self {
        Self {
            layers: self.layers,
            experts: self.experts,
            vectors: self.vectors.gather(slots),
            shares: self.shares.gather(slots),
            prompts: slots.iter().map(|&slot| self.prompt(slot).into()).collect(),
            free: Vec::new(),
        }
    }

    /// Takes a prompt in and returns its slot.
    pub(crate) fn insert(&mut self, prompt: &[u32], vector: &[f32], shares: &Shares) -> u32 {
        let slot = self.free.pop().unwrap_or(self.prompts.len() as u32);
        let index = slot as usize;
        if index == self.prompts.len() {
            self.prompts.push(Box::default());
        }
        if let Some(target) = self.prompts.get_mut(index) {
            *target = prompt.into();
        }
        self.vectors.set(index, vector);
        self.shares.set(index, shares.values());
        slot
    }

    /// Frees a slot.
    pub(crate) fn remove(&mut self, slot: u32) {
        if let Some(prompt) = self.prompts.get_mut(slot as usize).filter(|prompt| !prompt.is_empty()) {
            *prompt = Box::default();
            self.free.push(slot);
        }
    }

    /// Memory in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let tokens: usize = self.prompts.iter().map(|prompt| prompt.len()).sum();
        let lists = tokens * size_of::<u32>() + self.prompts.len() * size_of::<Box<[u32]>>();
        self.vectors.bytes() + self.shares.bytes() + lists as u64
    }
}
