//! Types of request fields that JSON can express in several ways. They buffer only what they keep, so that a small body
//! cannot become large in memory.

use crate::engine::request::Sampling;
use serde::de::value::{MapAccessDeserializer, SeqAccessDeserializer};
use serde::de::{DeserializeSeed, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;

/// A `T` that must be an object; serde's derived types accept lists as well.
#[derive(Debug)]
pub(super) struct Object<T>(pub(super) T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ObjectVisitor<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for ObjectVisitor<T> {
            type Value = Object<T>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
                T::deserialize(MapAccessDeserializer::new(map)).map(Object)
            }
        }
        deserializer.deserialize_map(ObjectVisitor(PhantomData))
    }
}

/// A list of at most `MAX` elements, because an empty element takes more memory than its text.
#[derive(Debug)]
pub(super) struct BoundedList<T, const MAX: usize>(pub(super) Vec<T>);

impl<'de, T: Deserialize<'de>, const MAX: usize> Deserialize<'de> for BoundedList<T, MAX> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct BoundedListVisitor<T, const MAX: usize>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>, const MAX: usize> Visitor<'de> for BoundedListVisitor<T, MAX> {
            type Value = BoundedList<T, MAX>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list")
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
                let mut few = Vec::new();
                while let Some(element) = list.next_element()? {
                    if few.len() == MAX {
                        return Err(A::Error::custom(format!("expected at most {MAX} elements")));
                    }
                    few.push(element);
                }
                Ok(BoundedList(few))
            }
        }
        deserializer.deserialize_seq(BoundedListVisitor(PhantomData))
    }
}

/// Most elements of a [`TextOr`].
const MAX_ELEMENTS: usize = 16384;

/// A text, or a list of objects.
#[derive(Debug)]
pub(super) enum TextOr<T> {
    /// A text.
    Text(String),
    /// At most [`MAX_ELEMENTS`] objects.
    List(Vec<Object<T>>),
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for TextOr<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TextOrVisitor<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for TextOrVisitor<T> {
            type Value = TextOr<T>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string or a list of objects")
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<Self::Value, E> {
                Ok(TextOr::Text(text.to_owned()))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<Self::Value, A::Error> {
                let BoundedList(list) =
                    BoundedList::<Object<T>, MAX_ELEMENTS>::deserialize(SeqAccessDeserializer::new(list))?;
                Ok(TextOr::List(list))
            }
        }
        deserializer.deserialize_any(TextOrVisitor(PhantomData))
    }
}

/// Value of a field that is refused if it demands anything.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) enum Given {
    /// Absent, null, false or empty.
    #[default]
    Nothing,
    /// A text.
    Text(String),
    /// Any other value.
    Something,
}

impl<'de> Deserialize<'de> for Given {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(GivenVisitor)
    }
}

struct GivenVisitor;

impl<'de> Visitor<'de> for GivenVisitor {
    type Value = Given;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("anything")
    }
    fn visit_unit<E: Error>(self) -> Result<Given, E> {
        Ok(Given::Nothing)
    }
    fn visit_bool<E: Error>(self, value: bool) -> Result<Given, E> {
        Ok(if value { Given::Something } else { Given::Nothing })
    }
    fn visit_i64<E: Error>(self, _: i64) -> Result<Given, E> {
        Ok(Given::Something)
    }
    fn visit_u64<E: Error>(self, _: u64) -> Result<Given, E> {
        Ok(Given::Something)
    }
    fn visit_f64<E: Error>(self, _: f64) -> Result<Given, E> {
        Ok(Given::Something)
    }
    fn visit_str<E: Error>(self, value: &str) -> Result<Given, E> {
        Ok(match value {
            "" => Given::Nothing,
            text => Given::Text(text.to_owned()),
        })
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Given, A::Error> {
        let mut given = Given::Nothing;
        while list.next_element::<IgnoredAny>()?.is_some() {
            given = Given::Something;
        }
        Ok(given)
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Given, A::Error> {
        let mut given = Given::Nothing;
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {
            given = Given::Something;
        }
        Ok(given)
    }
}

/// JSON that is kept as it is: at most [`MAX_VALUES`] values, because values take more memory than their text.
#[derive(Debug, Default)]
pub(super) struct Json(pub(super) Value);

/// Most values of a [`Json`].
const MAX_VALUES: usize = 1 << 16;

impl<'de> Deserialize<'de> for Json {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        JsonSeed { left: &mut { MAX_VALUES } }.deserialize(deserializer).map(Json)
    }
}

struct JsonSeed<'a> {
    left: &'a mut usize,
}

impl<'de> DeserializeSeed<'de> for JsonSeed<'_> {
    type Value = Value;
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        *self.left = self
            .left
            .checked_sub(1)
            .ok_or_else(|| D::Error::custom(format!("expected at most {MAX_VALUES} values")))?;
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for JsonSeed<'_> {
    type Value = Value;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }
    fn visit_unit<E: Error>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }
    fn visit_bool<E: Error>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }
    fn visit_i64<E: Error>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }
    fn visit_u64<E: Error>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }
    fn visit_f64<E: Error>(self, value: f64) -> Result<Value, E> {
        Ok(value.into())
    }
    fn visit_str<E: Error>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Value, A::Error> {
        let mut values = Vec::new();
        while let Some(value) = list.next_element_seed(JsonSeed { left: &mut *self.left })? {
            values.push(value);
        }
        Ok(values.into())
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let mut values = serde_json::Map::new();
        while let Some(name) = map.next_key::<String>()? {
            values.insert(name, map.next_value_seed(JsonSeed { left: &mut *self.left })?);
        }
        Ok(values.into())
    }
}

/// One prompt of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum PromptInput {
    /// Text for the tokenizer.
    Text(String),
    /// Token ids.
    Ids(Vec<u32>),
}

/// Most prompts that are parsed; the engine accepts far fewer.
const MAX_PROMPTS: usize = 1 << 16;

/// Field `prompt`: a text, token ids, or a list of either.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Prompts(pub(super) Vec<PromptInput>);

impl<'de> Deserialize<'de> for Prompts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct PromptsVisitor;
        impl<'de> Visitor<'de> for PromptsVisitor {
            type Value = Prompts;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string, a list of token ids, or a list of either")
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<Prompts, E> {
                Ok(Prompts(vec![PromptInput::Text(text.to_owned())]))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Prompts, A::Error> {
                let mut ids = Vec::new();
                let mut prompts = Vec::new();
                while let Some(element) = list.next_element()? {
                    match element {
                        Element::Id(id) => ids.push(id),
                        Element::Prompt(prompt) => prompts.push(prompt),
                    }
                    if prompts.len() > MAX_PROMPTS {
                        return Err(A::Error::custom(format!("expected at most {MAX_PROMPTS} prompts")));
                    }
                    if !ids.is_empty() && !prompts.is_empty() {
                        return Err(A::Error::custom(
                            "expected either token ids or prompts in one list, got both",
                        ));
                    }
                }
                if !ids.is_empty() {
                    prompts.push(PromptInput::Ids(ids));
                }
                if prompts.is_empty() {
                    return Err(A::Error::custom("expected a non-empty list"));
                }
                Ok(Prompts(prompts))
            }
        }
        deserializer.deserialize_any(PromptsVisitor)
    }
}

enum Element {
    Id(u32),
    Prompt(PromptInput),
}

impl<'de> Deserialize<'de> for Element {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ElementVisitor;
        impl<'de> Visitor<'de> for ElementVisitor {
            type Value = Element;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a token id, a string or a list of token ids")
            }
            fn visit_u64<E: Error>(self, id: u64) -> Result<Element, E> {
                let id = u32::try_from(id).map_err(|_| E::custom(format!("invalid token id {id}")))?;
                Ok(Element::Id(id))
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<Element, E> {
                Ok(Element::Prompt(PromptInput::Text(text.to_owned())))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Element, A::Error> {
                let mut ids = Vec::new();
                while let Some(id) = list.next_element()? {
                    ids.push(id);
                }
                Ok(Element::Prompt(PromptInput::Ids(ids)))
            }
        }
        deserializer.deserialize_any(ElementVisitor)
    }
}

/// A text or a list of texts.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Strings(pub(super) Vec<String>);

impl<'de> Deserialize<'de> for Strings {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct StringsVisitor;
        impl<'de> Visitor<'de> for StringsVisitor {
            type Value = Strings;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string or a list of strings")
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<Strings, E> {
                Ok(Strings(vec![text.to_owned()]))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Strings, A::Error> {
                let mut strings = Vec::new();
                while let Some(text) = list.next_element()? {
                    strings.push(text);
                }
                Ok(Strings(strings))
            }
        }
        deserializer.deserialize_any(StringsVisitor)
    }
}

/// Field `logprobs`: a flag in chats, a number in completions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Logprobs {
    /// Flag, as in chats.
    Flag(bool),
    /// Number of alternatives, as in completions.
    Count(i64),
}

impl<'de> Deserialize<'de> for Logprobs {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct LogprobsVisitor;
        impl Visitor<'_> for LogprobsVisitor {
            type Value = Logprobs;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("true or false in chats, an integer in completions")
            }
            fn visit_bool<E: Error>(self, flag: bool) -> Result<Logprobs, E> {
                Ok(Logprobs::Flag(flag))
            }
            fn visit_i64<E: Error>(self, count: i64) -> Result<Logprobs, E> {
                Ok(Logprobs::Count(count))
            }
            fn visit_u64<E: Error>(self, count: u64) -> Result<Logprobs, E> {
                Ok(Logprobs::Count(i64::try_from(count).unwrap_or(i64::MAX)))
            }
        }
        deserializer.deserialize_any(LogprobsVisitor)
    }
}

/// Field `seed`: 64 bits, as a signed or unsigned number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Seed(pub(super) u64);

impl<'de> Deserialize<'de> for Seed {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct SeedVisitor;
        impl Visitor<'_> for SeedVisitor {
            type Value = Seed;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a 64-bit integer")
            }
            fn visit_i64<E: Error>(self, seed: i64) -> Result<Seed, E> {
                Ok(Seed(seed.cast_unsigned()))
            }
            fn visit_u64<E: Error>(self, seed: u64) -> Result<Seed, E> {
                Ok(Seed(seed))
            }
        }
        deserializer.deserialize_any(SeedVisitor)
    }
}

/// Field `logit_bias`: terms added to logits, by token id (a text in JSON).
#[derive(Debug, Default)]
pub(super) struct LogitBias(pub(super) BTreeMap<u32, f64>);

impl<'de> Deserialize<'de> for LogitBias {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct LogitBiasVisitor;
        impl<'de> Visitor<'de> for LogitBiasVisitor {
            type Value = LogitBias;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of token ids and numbers")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<LogitBias, A::Error> {
                let mut biases = BTreeMap::new();
                while let Some(key) = map.next_key::<String>()? {
                    let id =
                        key.parse().map_err(|_| A::Error::custom(format!("invalid token id {key:?}")))?;
                    biases.insert(id, map.next_value()?);
                    if biases.len() > Sampling::MAX_BIASES {
                        let most = Sampling::MAX_BIASES;
                        return Err(A::Error::custom(format!("expected at most {most} tokens")));
                    }
                }
                Ok(LogitBias(biases))
            }
        }
        deserializer.deserialize_map(LogitBiasVisitor)
    }
}
