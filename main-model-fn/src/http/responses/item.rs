//! Input items of `/v1/responses`: types only.

use crate::http::fields::TextOr;
use serde::Deserialize;

/// Field `input`: a text of the user, or items.
pub(super) type Input = TextOr<Item>;

/// Text, or parts with text.
pub(super) type Content = TextOr<ContentPart>;

/// An item; it has the fields of all kinds.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Item {
    #[serde(rename = "type")]
    pub(super) kind: Option<String>,
    pub(super) role: Option<String>,
    pub(super) content: Option<Content>,
    pub(super) summary: Option<Content>,
    pub(super) call_id: Option<String>,
    pub(super) name: Option<String>,
    pub(super) arguments: Option<String>,
    pub(super) output: Option<Content>,
}

/// A part of a content.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct ContentPart {
    #[serde(rename = "type")]
    pub(super) kind: Option<String>,
    pub(super) text: Option<String>,
    pub(super) refusal: Option<String>,
}
