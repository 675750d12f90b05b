//! A map of strings in which no key stands twice; the map types of readers keep the last of them without a word.

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, Visitor};
use std::collections::BTreeMap;
use std::fmt;

/// A map of strings whose keys differ.
#[derive(Debug, Default)]
pub(super) struct Distinct(pub(super) BTreeMap<String, String>);

impl<'de> Deserialize<'de> for Distinct {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Distinct, D::Error> {
        struct Strings;
        impl<'de> Visitor<'de> for Strings {
            type Value = Distinct;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map of strings")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Distinct, A::Error> {
                let mut found = BTreeMap::new();
                while let Some((key, value)) = map.next_entry::<String, String>()? {
                    if found.contains_key(&key) {
                        return Err(A::Error::custom(format_args!("key `{key}` stands twice")));
                    }
                    found.insert(key, value);
                }
                Ok(Distinct(found))
            }
        }
        from.deserialize_map(Strings)
    }
}
