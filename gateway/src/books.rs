//! Who had what for how much: records for the ledger, metrics, and what tenants have spent today.

use crate::cost_metrics::CostMetrics;
use prometheus::Registry;
use remoe_ledger::{
    Account, AccountError, FunctionEvent, FunctionRecord, Ledger, Rates, Record, RequestRecord, Told,
    records, records_since,
};
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

const DAY: u64 = 86_400_000_000_000;

/// The functions that answer together for a model, for the ledger.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Billing {
    /// What they cost.
    pub rates: Rates,
    /// By the names of `rates`: the function, under a name that no other one ever has, and its tier.
    pub functions: BTreeMap<String, (String, String)>,
}

impl Billing {
    /// The main function.
    pub(crate) fn main(&self) -> String {
        self.functions.get("main").map(|(function, _)| function.clone()).unwrap_or_default()
    }
}

/// An answer that is about to be complete.
pub(crate) struct Answered<'a> {
    pub(crate) id: &'a str,
    pub(crate) model: &'a str,
    pub(crate) tenant: &'a str,
    pub(crate) prompt_tokens: u64,
    pub(crate) completion_tokens: u64,
    pub(crate) told: Told,
}

/// What is known of money: of answers from the gateway, of functions from whoever starts them.
pub struct Books {
    ledger: Option<Ledger>,
    metrics: CostMetrics,
    state: Mutex<State>,
}

struct State {
    /// Everything since these books were opened.
    account: Account,
    /// Nano-dollars that tenants have spent on [`Self::day`].
    spent: BTreeMap<String, u64>,
    day: u64,
}

impl Books {
    /// Books that are kept in `ledger`, or only as long as this process lives. `prices` says where the prices stand.
    ///
    /// # Errors
    /// The ledger cannot be read, or a metric's name is taken in `registry`.
    pub fn open(ledger: Option<Ledger>, prices: &str, registry: &Registry) -> Result<Self, BooksError> {
        let now = now();
        let day = now / DAY;
        let mut spent: BTreeMap<String, u64> = BTreeMap::new();
        if let Some(ledger) = &ledger {
            for record in records_since(ledger.folder(), day * DAY).map_err(AccountError::from)? {
                let (at, tenant, amount) = match record.map_err(AccountError::from)? {
                    Record::Request(request) => (request.at, request.tenant.clone(), request.total()),
                    Record::Lost { at, tenant, estimate, .. } => (at, tenant, estimate),
                    _ => continue,
                };
                if at / DAY == day {
                    *spent.entry(tenant).or_default() += amount;
                }
            }
        }
        let state = State { account: Account::default(), spent, day };
        let metrics = CostMetrics::new(registry, prices)?;
        let books = Self { ledger, metrics, state: Mutex::new(state) };
        books.write(Record::Opened { at: now, prices: prices.to_owned() });
        Ok(books)
    }

    /// A function came to `event` `at` this time, in nanoseconds since 1970 as [`Self::now`].
    pub fn function(&self, at: u64, model: &str, function: &str, event: FunctionEvent) {
        let (model, function) = (model.to_owned(), function.to_owned());
        self.write(Record::Function(FunctionRecord { at, model, function, event }));
    }

    /// Nanoseconds since 1970.
    #[must_use]
    pub fn now() -> u64 {
        now()
    }

    /// What had started and not stopped is alive; gateway and launcher have cost `overhead` since the last time.
    pub fn alive(&self, overhead: u64) {
        self.write(Record::Alive { at: now(), overhead });
    }

    /// `model` costs `rate` nano-dollars an hour now in `tier`, at the price of all that is alive of it.
    pub fn costs_now(&self, model: &str, tier: &str, rate: u64) {
        self.metrics.rate(model, tier, rate);
    }

    /// All that was written so far, added up: of the ledger, or of this process where none is kept.
    ///
    /// # Errors
    /// The ledger cannot be read.
    pub fn added_up(&self) -> Result<Account, AccountError> {
        match &self.ledger {
            Some(ledger) => Account::of(records(ledger.folder())?),
            None => Ok(self.state().account.clone().until(now())),
        }
    }

    pub(crate) fn answered(&self, answered: Answered<'_>, billing: &Billing) -> u64 {
        let Answered { id, model, tenant, prompt_tokens, completion_tokens, told } = answered;
        let shares = told.shares.into_iter().filter_map(|(name, mut share)| {
            let (function, tier) = billing.functions.get(&name)?;
            share.tier.clone_from(tier);
            Some((function.clone(), share))
        });
        let request = RequestRecord {
            at: now(),
            id: id.to_owned(),
            model: model.to_owned(),
            tenant: tenant.to_owned(),
            function: billing.main(),
            prompt_tokens,
            completion_tokens,
            shares: shares.collect(),
            rivals: told.rivals,
            served: told.served,
        };
        let total = request.total();
        self.metrics.answered(&request);
        self.spend(&request.tenant, request.at, total);
        self.write(Record::Request(request));
        total
    }

    /// A request that a function had `since` then ends without an answer, after `tokens` as far as is known. Its
    /// tenant's budget is charged for those what tokens of answers have cost on average, so that nobody serves
    /// himself free of charge by leaving before the end.
    pub(crate) fn lost(&self, model: &str, tenant: &str, since: u64, tokens: u64, billing: &Billing) {
        let at = now();
        let (model, tenant) = (model.to_owned(), tenant.to_owned());
        let answered = self.state().account.answered;
        let known = u128::from(answered.prompt_tokens + answered.completion_tokens).max(1);
        let estimate = u128::from(answered.cost) * u128::from(tokens) / known;
        let estimate = u64::try_from(estimate).unwrap_or(u64::MAX);
        self.spend(&tenant, at, estimate);
        self.write(Record::Lost { at, since, estimate, model, tenant, function: billing.main() });
    }

    /// Nano-dollars that `tenant` has spent today, and how long today lasts.
    pub(crate) fn spent_today(&self, tenant: &str) -> (u64, Duration) {
        let now = now();
        let mut state = self.state();
        state.begin_day(now);
        let left = Duration::from_nanos(DAY - now % DAY);
        (state.spent.get(tenant).copied().unwrap_or(0), left)
    }

    /// Brings metrics up to date that follow from the clock; `budgets` of tenants, by name.
    pub(crate) fn refresh<'a>(&self, budgets: impl Iterator<Item = (&'a str, u64)>) {
        let now = now();
        let mut state = self.state();
        state.begin_day(now);
        for (tenant, budget) in budgets {
            self.metrics.budget(tenant, budget, state.spent.get(tenant).copied().unwrap_or(0));
        }
        let account = state.account.clone();
        drop(state);
        self.metrics.account(&account.until(now));
    }

    pub(crate) fn metrics(&self) -> &CostMetrics {
        &self.metrics
    }

    fn spend(&self, tenant: &str, at: u64, amount: u64) {
        let mut state = self.state();
        state.begin_day(at);
        match state.spent.get_mut(tenant) {
            Some(spent) => *spent = spent.saturating_add(amount),
            None => drop(state.spent.insert(tenant.to_owned(), amount)),
        }
    }

    /// Writes `record`. Serving goes on where the ledger takes no more: that is counted, and an alert.
    fn write(&self, record: Record) {
        if let Some(ledger) = &self.ledger {
            match ledger.append(&record) {
                Ok(()) => self.metrics.wrote(),
                Err(error) => {
                    self.metrics.failed();
                    tracing::error!(%error, ?record, "the ledger did not take a record");
                }
            }
        }
        if let Err(error) = self.state().account.add(record) {
            tracing::error!(%error, "a record is not accounted for");
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Sums that are right after every step.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn begin_day(&mut self, now: u64) {
        if now / DAY > self.day {
            self.day = now / DAY;
            self.spent.clear();
        }
    }
}

/// Why books cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum BooksError {
    /// The ledger cannot be read.
    #[error(transparent)]
    Ledger(#[from] AccountError),
    /// A metric's name is taken.
    #[error(transparent)]
    Metrics(#[from] prometheus::Error),
}

/// Nanoseconds since 1970.
fn now() -> u64 {
    // 584 years fit.
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64)
}
