//! Text: tokenizer, streaming detokenizer and chat template.

mod bound;
mod detokenizer;
mod error;
mod guard;
mod instrument;
mod python_json;
mod template;
mod tiktoken;
mod tokenizer;

pub use detokenizer::Detokenizer;
pub use error::TextError;
pub use template::{ChatTemplate, Rendering};
pub use tokenizer::Tokenizer;
