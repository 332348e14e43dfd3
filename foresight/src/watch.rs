//! A [`Foresight`] with a thread of its own, so that no request waits for it.

use crate::foresight::{Arrival, Foresight};
use crate::memory::Tenant;
use crate::mix::Mix;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::time::Duration;

/// Requests that have come and were not looked at yet, at most; further ones are served without a prediction.
const QUEUE: usize = 256;
/// A longer body is served without a prediction.
const LONGEST_BODY: usize = 256 << 10;

/// Takes note of requests, and answers what those who are here will use.
///
/// Events are looked at in their order by one thread, which ends when this is dropped.
#[derive(Debug)]
pub struct Watch {
    events: Sender<Event>,
    queued: Arc<AtomicUsize>,
}

#[derive(Debug)]
enum Event {
    Came { id: u64, tenant: Tenant, body: Vec<u8> },
    Told { id: u64, activations: String },
    Left { id: u64 },
    Asked { answer: SyncSender<Option<Mix>> },
}

impl Watch {
    /// Starts the thread. It calls `learned` after every request whose activations were told.
    ///
    /// # Errors
    /// The system refuses a thread.
    pub fn start(foresight: Foresight, learned: impl FnMut(&Foresight) + Send + 'static) -> io::Result<Self> {
        let (events, inlet) = channel();
        let queued = Arc::new(AtomicUsize::new(0));
        let seen = queued.clone();
        std::thread::Builder::new()
            .name("foresight".to_owned())
            .spawn(move || follow(foresight, &inlet, &seen, learned))?;
        Ok(Self { events, queued })
    }

    /// The request `id` of `tenant` has come. False where it will not be followed: then nothing else is to be said of it.
    pub fn came(&self, id: u64, tenant: &str, body: &[u8]) -> bool {
        if body.len() > LONGEST_BODY {
            return false;
        }
        // Every event but this one belongs to a request that was let in here: the queue is bounded by them.
        if self.queued.fetch_add(1, Ordering::Relaxed) >= QUEUE {
            self.queued.fetch_sub(1, Ordering::Relaxed);
            return false;
        }
        self.send(Event::Came { id, tenant: Tenant::named(tenant), body: body.to_vec() });
        true
    }

    /// What a main function told of the request `id`.
    pub fn told(&self, id: u64, activations: &str) {
        if activations.len() <= remoe_predictor::MAX_ACTIVATIONS_BYTES {
            self.send(Event::Told { id, activations: activations.to_owned() });
        }
    }

    /// The request `id` is over.
    pub fn left(&self, id: u64) {
        self.send(Event::Left { id });
    }

    /// What those who have come by now will use. Waits `most` for it, blocking; `None` where nothing is known by then.
    #[must_use]
    pub fn mix(&self, most: Duration) -> Option<Mix> {
        let (answer, answered) = sync_channel(1);
        self.send(Event::Asked { answer });
        answered.recv_timeout(most).ok().flatten()
    }

    fn send(&self, event: Event) {
        // The thread ends with this.
        let _always_there = self.events.send(event);
    }
}

fn follow(
    mut foresight: Foresight,
    events: &Receiver<Event>,
    queued: &AtomicUsize,
    mut learned: impl FnMut(&Foresight),
) {
    for event in events {
        match event {
            Event::Came { id, tenant, body } => {
                queued.fetch_sub(1, Ordering::Relaxed);
                foresight.came(Arrival { id, tenant, body: &body });
            }
            Event::Told { id, activations } => match foresight.told(id, &activations) {
                Ok(()) => learned(&foresight),
                Err(error) => tracing::warn!(%error, "nothing is learned from a request"),
            },
            Event::Left { id } => foresight.left(id),
            Event::Asked { answer } => {
                let mix = foresight.mix().unwrap_or_else(|error| {
                    tracing::warn!(%error, "nothing is said of those who wait");
                    None
                });
                // Who asked may have gone on without it.
                let _late = answer.try_send(mix);
            }
        }
    }
}
