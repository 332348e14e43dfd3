//! Vocabulary of the model as bytes, in the form of the grammar library.

use llguidance::toktrie::{ApproximateTokEnv, INVALID_TOKEN, InferenceCapabilities, TokRxInfo, TokTrie};
use llguidance::{ParserFactory, panic_utils};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;

/// Longest token in bytes. Longer ones are never allowed under a grammar, because the library's trie cannot hold them.
const MAX_TOKEN_BYTES: usize = 1000;

/// Texts of a model's tokens.
pub(crate) trait Tokens: Send + Sync {
    /// Returns the bytes of a token's text; empty for ids without a token.
    fn bytes(&self, id: u32) -> Vec<u8>;

    /// Reports if a token is special: a grammar of text never allows it.
    fn is_special(&self, id: u32) -> bool;
}

/// Creates the factory that compiles grammars over a vocabulary of `vocab_size` tokens, of which `end_ids` end an answer. Takes
/// a moment, because the tokens are sorted into a trie.
///
/// # Errors
/// Fails if the library cannot hold the vocabulary.
pub(super) fn factory(
    tokens: &dyn Tokens,
    vocab_size: usize,
    end_ids: &[u32],
) -> Result<ParserFactory, String> {
    let count =
        u32::try_from(vocab_size).map_err(|_| format!("vocabulary too large: {vocab_size} tokens"))?;
    let words: Vec<Vec<u8>> = (0..count).map(|id| word(tokens, id)).collect();
    let ends: Vec<u32> = end_ids.iter().copied().filter(|&id| id < count).collect();
    let build = || {
        let info = TokRxInfo::new(count, ends.first().copied().unwrap_or(INVALID_TOKEN));
        let trie = TokTrie::from(&info, &words);
        let trie = if ends.is_empty() { trie } else { trie.with_eos_tokens(&ends) };
        // Not canonical: no token is forced where the model may split a text differently.
        let environment = Arc::new(ApproximateTokEnv::new(trie));
        ParserFactory::new(
            &(environment as _),
            InferenceCapabilities::default(),
            &llguidance::earley::SlicedBiasComputer::general_slices(),
        )
    };
    panic_utils::catch_unwind(AssertUnwindSafe(build)).map_err(|error| error.to_string())
}

fn word(tokens: &dyn Tokens, id: u32) -> Vec<u8> {
    let mut bytes = tokens.bytes(id);
    if tokens.is_special(id) {
        bytes.insert(0, TokTrie::SPECIAL_TOKEN_MARKER);
    }
    if bytes.len() > MAX_TOKEN_BYTES { Vec::new() } else { bytes }
}
