//! Source: a folder of a web server.

use super::{below, encoded};
use reqwest::Url;

#[derive(Debug)]
pub(crate) struct Web {
    base: Url,
}

impl Web {
    pub(crate) fn new(base: Url) -> Self {
        Self { base }
    }

    pub(super) fn url(&self, name: &str) -> Url {
        below(&self.base, &encoded(name))
    }
}
