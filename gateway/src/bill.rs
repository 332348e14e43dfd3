//! The bill of one request: who pays, and which functions work for it.

use crate::books::{Answered, Billing, Books};
use crate::gateway::Gateway;
use crate::model::Backend;
use remoe_ledger::Told;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// A request that functions may work for.
pub(crate) struct Bill {
    pub(crate) gateway: Arc<Gateway>,
    /// As in `x-request-id`.
    pub(crate) id: Box<str>,
    pub(crate) model: Box<str>,
    pub(crate) tenant: Arc<str>,
    /// The client wants to see what it cost.
    pub(crate) is_shown: bool,
    /// When a backend got it last, in nanoseconds since 1970; 0 before.
    sent: AtomicU64,
    /// The functions that work for it, until they have told what that cost.
    open: Mutex<Option<Arc<Billing>>>,
}

impl Bill {
    pub(crate) fn new(
        gateway: Arc<Gateway>,
        id: &str,
        model: &str,
        tenant: Arc<str>,
        is_shown: bool,
    ) -> Self {
        let (id, model) = (id.into(), model.into());
        Self { gateway, id, model, tenant, is_shown, sent: AtomicU64::new(0), open: Mutex::new(None) }
    }

    /// `backend` gets the request, or gets it again. What [`Self::not_sent`] takes where it could not be reached.
    pub(crate) fn sent_to(&self, backend: &Backend) -> u64 {
        self.replace(backend.billing.clone());
        self.sent.swap(Books::now(), Ordering::Relaxed)
    }

    /// The backend did not get it: all is as before.
    pub(crate) fn not_sent(&self, before: u64) {
        self.sent.store(before, Ordering::Relaxed);
        self.void();
    }

    /// Whether any backend had it.
    pub(crate) fn was_sent(&self) -> bool {
        self.sent.load(Ordering::Relaxed) > 0
    }

    /// Whether functions work for it and have not told what that cost.
    pub(crate) fn is_open(&self) -> bool {
        self.open.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// It cost what was `told`: that is written down before this returns, in nano-dollars.
    pub(crate) fn settle(&self, told: Told, prompt_tokens: u64, completion_tokens: u64) -> Option<u64> {
        let (billing, books) = (self.replace(None)?, self.gateway.books()?);
        let (id, model, tenant) = (&*self.id, &*self.model, &*self.tenant);
        let is_new = |name| !billing.functions.contains_key(name);
        let since = if told.shares.keys().any(is_new) { self.since(&billing) } else { None };
        let answered = Answered { id, model, tenant, prompt_tokens, completion_tokens, told };
        Some(books.answered(answered, &billing, since.as_deref()))
    }

    /// What the same main function works with by now: a revision may have given it other remote functions while the
    /// request ran.
    fn since(&self, sent: &Billing) -> Option<Arc<Billing>> {
        let models = self.gateway.models();
        let model = models.iter().find(|model| model.name() == &*self.model)?;
        model.billings().into_iter().find(|billing| billing.main() == sent.main())
    }

    /// Nothing is owed: it was refused, or generates nothing.
    pub(crate) fn void(&self) {
        self.replace(None);
    }

    /// What the functions did for it was for nothing; its client leaves after `tokens`, about.
    pub(crate) fn lost(&self, tokens: u64) {
        if let (Some(billing), Some(books)) = (self.replace(None), self.gateway.books()) {
            books.lost(&self.model, &self.tenant, self.sent.load(Ordering::Relaxed), tokens, &billing);
        }
    }

    fn replace(&self, open: Option<Arc<Billing>>) -> Option<Arc<Billing>> {
        std::mem::replace(&mut *self.open.lock().unwrap_or_else(PoisonError::into_inner), open)
    }
}

impl Drop for Bill {
    fn drop(&mut self) {
        self.lost(0);
    }
}
