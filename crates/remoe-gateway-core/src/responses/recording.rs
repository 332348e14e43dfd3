//! Recording of an answer on its way to the client, to store it.

use super::items::{elements, is_id, join};
use super::store::ResponseStore;
use serde::Deserialize;
use serde_json::value::RawValue;
use std::sync::Arc;

/// Response that is stored when its answer is complete.
pub(crate) struct Recording {
    store: Arc<ResponseStore>,
    tenant: Arc<str>,
    /// All items before the output, as a JSON list without brackets.
    input: String,
}

/// Data of the last event of a stream.
#[derive(Deserialize)]
struct LastEvent<'a> {
    #[serde(borrow)]
    response: &'a RawValue,
}

#[derive(Deserialize)]
struct RecordedResponse<'a> {
    id: String,
    status: String,
    #[serde(borrow)]
    output: &'a RawValue,
}

impl Recording {
    pub(super) fn new(store: Arc<ResponseStore>, tenant: Arc<str>, input: String) -> Self {
        Self { store, tenant, input }
    }

    /// Stores the response in `event`, the last event of a stream.
    pub(crate) fn store_event(self, event: &[u8]) {
        let text = std::str::from_utf8(event).unwrap_or_default();
        let data = text.lines().find_map(|line| line.strip_prefix("data: ")).unwrap_or_default();
        if let Ok(LastEvent { response }) = serde_json::from_str(data) {
            self.store_response(response.get());
        }
    }

    /// Stores `response`, the whole body of an answer.
    pub(crate) fn store_body(self, response: &[u8]) {
        self.store_response(std::str::from_utf8(response).unwrap_or_default());
    }

    fn store_response(self, response: &str) {
        let Ok(RecordedResponse { id, status, output }) = serde_json::from_str(response) else { return };
        let is_done = matches!(status.as_str(), "completed" | "incomplete");
        let Some(output) = elements(output.get()).filter(|_| is_done && is_id(&id)) else { return };
        self.store.put(&id, self.tenant, join(&[&self.input, output]), response.to_owned());
    }
}
