//! Messages and content blocks of `/v1/messages`: types only.

use crate::http::fields::{BoundedList, Json, TextOr};
use serde::Deserialize;

/// Text, or blocks.
pub(super) type Content = TextOr<Block>;

/// Messages, up to a maximum.
pub(super) type Messages = BoundedList<crate::http::fields::Object<Message>, 16384>;

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Message {
    pub(super) role: Option<String>,
    pub(super) content: Option<Content>,
}

/// A block; it has the fields of all kinds.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Block {
    #[serde(rename = "type")]
    pub(super) kind: Option<String>,
    pub(super) text: Option<String>,
    pub(super) thinking: Option<String>,
    pub(super) id: Option<String>,
    pub(super) name: Option<String>,
    pub(super) input: Option<Json>,
    pub(super) tool_use_id: Option<String>,
    pub(super) content: Option<Box<Content>>,
}
