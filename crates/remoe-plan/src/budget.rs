//! Budgets of a search: the caller says while it runs whether it goes on, finishes or is cancelled.
//!
//! The planner knows no clock. It counts the terms that it sums, and asks after every [`ASK_EVERY`] of them.

use std::cell::Cell;
use std::fmt;

/// Answer of a caller to the question whether a search goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Proceed {
    /// The search goes on.
    Continue,
    /// The search returns the best plan so far. If none is known yet, it goes on until the first one.
    Finish,
    /// The search returns [`crate::PlanError::Cancelled`] as soon as possible.
    Cancel,
}

/// Time that a search may take, as its caller says.
#[derive(Clone, Copy, Default)]
pub struct Budget<'a> {
    ask: Option<&'a dyn Fn() -> Proceed>,
}

impl Budget<'_> {
    /// A search that ends by itself. It gives the same answer on every run.
    pub const UNLIMITED: Self = Self { ask: None };
}

impl<'a> Budget<'a> {
    /// A search that asks `proceed` about every 10 microseconds. [`Proceed::Finish`] and [`Proceed::Cancel`] are final.
    #[must_use]
    pub fn new(proceed: &'a dyn Fn() -> Proceed) -> Self {
        Self { ask: Some(proceed) }
    }
}

impl Budget<'_> {
    /// Returns what the caller says now.
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

/// Terms that are summed between two questions.
const ASK_EVERY: usize = 1_000;

/// Counter of a search's work, which asks its budget. All models of one search share it.
pub struct Meter<'b> {
    budget: Budget<'b>,
    done: Cell<usize>,
    /// Terms at which the budget is asked again.
    next: Cell<usize>,
    /// Terms after which the search finishes by itself.
    most: Cell<usize>,
    told: Cell<Proceed>,
    /// Set once a plan that keeps every limit is known.
    has_plan: Cell<bool>,
    /// Set once the budget kept the search from going on.
    is_cut: Cell<bool>,
    /// Set once the search is over and its result is worked out.
    concludes: Cell<bool>,
}

impl<'b> Meter<'b> {
    /// Starts to count the work of a search within `budget`.
    pub fn new(budget: Budget<'b>) -> Self {
        Self {
            budget,
            done: Cell::new(0),
            next: Cell::new(if budget.ask.is_some() { ASK_EVERY } else { usize::MAX }),
            most: Cell::new(usize::MAX),
            told: Cell::new(Proceed::Continue),
            has_plan: Cell::new(false),
            is_cut: Cell::new(false),
            concludes: Cell::new(false),
        }
    }

    /// Counts `terms`, and asks the budget if it is due.
    pub fn count(&self, terms: usize) {
        self.done.set(self.done.get().saturating_add(terms));
        if self.done.get() >= self.next.get() {
            self.ask();
        }
    }

    fn ask(&self) {
        let Some(ask) = self.budget.ask else { return };
        self.next.set(self.done.get().saturating_add(ASK_EVERY));
        // A search that was told to finish can still be cancelled.
        match (self.told.get(), ask()) {
            (Proceed::Cancel, _) | (_, Proceed::Continue) => {}
            (_, told) => self.told.set(told),
        }
    }

    /// Terms counted so far.
    pub fn done(&self) -> usize {
        self.done.get()
    }

    /// Has the search finish at so many terms, whatever the budget says.
    pub fn limit_at(&self, terms: usize) {
        self.most.set(terms);
    }

    /// Returns true if the search is to return what it has: it is cancelled, or it has a plan and is to finish.
    pub fn ends(&self) -> bool {
        let searches = self.has_plan.get() && !self.concludes.get();
        let ends = match self.told.get() {
            Proceed::Continue => false,
            Proceed::Finish => searches,
            Proceed::Cancel => true,
        };
        if ends {
            self.is_cut.set(true);
        }
        ends || (searches && self.done.get() >= self.most.get())
    }

    /// Notes that the search is over: from here on only a cancelled one ends early.
    pub fn conclude(&self) {
        self.concludes.set(true);
    }

    /// Reports if the caller cancelled the search.
    pub fn is_cancelled(&self) -> bool {
        self.told.get() == Proceed::Cancel
    }

    /// Returns true if the budget said that the search finishes.
    pub fn is_finishing(&self) -> bool {
        self.told.get() == Proceed::Finish
    }

    /// Notes that a plan that keeps every limit is known.
    pub fn found_plan(&self) {
        self.has_plan.set(true);
    }

    /// Returns true if the budget kept any part of the search from going on.
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
