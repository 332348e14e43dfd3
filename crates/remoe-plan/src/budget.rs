//! Budget of a search: a callback decides while it runs whether it continues, finishes or is cancelled.
//!
//! The planner has no clock. It counts summed terms, and calls the callback after every [`CHECK_EVERY`] of them.

use std::cell::Cell;
use std::fmt;

/// Decision of a caller on a running search.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Proceed {
    /// The search continues.
    Continue,
    /// The search returns the best plan so far. If none is known yet, it continues until the first one.
    Finish,
    /// The search returns [`crate::PlanError::Cancelled`] as soon as possible.
    Cancel,
}

/// Limit of a search, decided by a callback of its caller.
#[derive(Clone, Copy, Default)]
pub struct Budget<'a> {
    ask: Option<&'a dyn Fn() -> Proceed>,
}

impl Budget<'_> {
    /// No limit: the search gives the same result on every run.
    pub const UNLIMITED: Self = Self { ask: None };
}

impl<'a> Budget<'a> {
    /// Creates a budget whose callback is called about every 10 microseconds. [`Proceed::Finish`] and [`Proceed::Cancel`] are
    /// final.
    #[must_use]
    pub fn new(proceed: &'a dyn Fn() -> Proceed) -> Self {
        Self { ask: Some(proceed) }
    }
}

impl Budget<'_> {
    /// Calls the callback.
    #[must_use]
    pub fn proceed(&self) -> Proceed {
        self.ask.map_or(Proceed::Continue, |ask| ask())
    }
}

impl fmt::Debug for Budget<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Budget").field("is_limited", &self.ask.is_some()).finish()
    }
}

/// Summed terms between two calls of the callback.
const CHECK_EVERY: usize = 1_000;

/// Counter of a search's work, which checks its budget. All models of one search share it.
pub struct Meter<'b> {
    budget: Budget<'b>,
    done: Cell<usize>,
    /// Terms at which the budget is checked next.
    next: Cell<usize>,
    /// Limit of the terms, at which the search finishes.
    most: Cell<usize>,
    decision: Cell<Proceed>,
    /// Set once a plan that keeps every limit is known.
    has_plan: Cell<bool>,
    /// Set once the budget ended the search early.
    is_cut: Cell<bool>,
    /// Set once the search is over and its result is evaluated.
    concludes: Cell<bool>,
}

impl<'b> Meter<'b> {
    /// Creates the counter of a search within `budget`.
    pub fn new(budget: Budget<'b>) -> Self {
        Self {
            budget,
            done: Cell::new(0),
            next: Cell::new(if budget.ask.is_some() { CHECK_EVERY } else { usize::MAX }),
            most: Cell::new(usize::MAX),
            decision: Cell::new(Proceed::Continue),
            has_plan: Cell::new(false),
            is_cut: Cell::new(false),
            concludes: Cell::new(false),
        }
    }

    /// Counts `terms`, and checks the budget if that is due.
    pub fn count(&self, terms: usize) {
        self.done.set(self.done.get().saturating_add(terms));
        if self.done.get() >= self.next.get() {
            self.ask();
        }
    }

    fn ask(&self) {
        let Some(ask) = self.budget.ask else { return };
        self.next.set(self.done.get().saturating_add(CHECK_EVERY));
        // A finishing search can still be cancelled.
        match (self.decision.get(), ask()) {
            (Proceed::Cancel, _) | (_, Proceed::Continue) => {}
            (_, decision) => self.decision.set(decision),
        }
    }

    /// Returns the terms counted so far.
    pub fn done(&self) -> usize {
        self.done.get()
    }

    /// Limits the search to `terms`, independently of the budget.
    pub fn limit_at(&self, terms: usize) {
        self.most.set(terms);
    }

    /// Reports if the search must return: it is cancelled, or it has a plan and must finish.
    pub fn ends(&self) -> bool {
        let searches = self.has_plan.get() && !self.concludes.get();
        let ends = match self.decision.get() {
            Proceed::Continue => false,
            Proceed::Finish => searches,
            Proceed::Cancel => true,
        };
        if ends {
            self.is_cut.set(true);
        }
        ends || (searches && self.done.get() >= self.most.get())
    }

    /// Marks the search as over: from here on only cancellation ends it early.
    pub fn conclude(&self) {
        self.concludes.set(true);
    }

    /// Reports if the caller cancelled the search.
    pub fn is_cancelled(&self) -> bool {
        self.decision.get() == Proceed::Cancel
    }

    /// Reports if the caller asked the search to finish.
    pub fn is_finishing(&self) -> bool {
        self.decision.get() == Proceed::Finish
    }

    /// Marks that a plan that keeps every limit is known.
    pub fn found_plan(&self) {
        self.has_plan.set(true);
    }

    /// Reports if the budget ended any part of the search early.
    pub fn is_cut(&self) -> bool {
        self.is_cut.get()
    }
}

impl Default for Meter<'_> {
    fn default() -> Self {
        Self::new(Budget::UNLIMITED)
    }
}

impl fmt::Debug for Meter<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Meter").field("budget", &self.budget).field("done", &self.done.get()).finish()
    }
}
