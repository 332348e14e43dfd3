//! Conversion between text and tokens: tokenizer, streaming detokenizer, chat templates.

mod detokenizer;
mod error;
mod jinja;
mod template;
mod tiktoken;
mod token_bound;
mod tokenizer;
mod tools_for_template;

pub use detokenizer::Detokenizer;
pub use error::TextError;
pub use template::{ChatTemplate, Rendering};
pub use tokenizer::Tokenizer;
pub use tools_for_template::tools_for_template;
