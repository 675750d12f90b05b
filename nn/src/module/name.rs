//! Dotted parameter names: glob patterns, suggestions for misspelt patterns, and random keys derived from names.

/// Whether a glob pattern matches `name`: `*` matches any run of characters, dots included. A pattern that does not begin with
/// `*` also matches without the leading parts of the name: `c_fc.weight` matches `h.3.mlp.c_fc.weight`. Patterns see through
/// wrappers of layers ([`unwrapped`]): `c_fc.weight` matches `c_fc.base.weight`.
///
/// ```
/// use shardgrad_nn::module::name::matches;
/// assert!(matches("c_fc.*", "h.3.mlp.c_fc.weight") && matches("h.*.bias", "h.3.mlp.c_fc.bias"));
/// assert!(matches("q_proj.weight", "layers.0.q_proj.base.weight"));
/// assert!(!matches("fc.weight", "h.3.mlp.c_fc.weight"));
/// ```
#[must_use]
pub fn matches(pattern: &str, name: &str) -> bool {
    matches_path(pattern, name) || unwrapped(name).is_some_and(|name| matches_path(pattern, &name))
}

/// Returns a name without its components `base`; `None` if it has none. A layer that wraps another one calls the wrapped layer
/// `base`, so that the parameters of the wrapped layer keep their rules in plans and their names in files.
///
/// ```
/// use shardgrad_nn::module::name::unwrapped;
/// assert_eq!(unwrapped("layers.0.q_proj.base.weight").as_deref(), Some("layers.0.q_proj.weight"));
/// assert_eq!(unwrapped("database.weight"), None);
/// ```
#[doc(alias = "base_layer")]
#[must_use]
pub fn unwrapped(name: &str) -> Option<String> {
    let is_wrapped = name.split('.').any(|part| part == "base");
    is_wrapped.then(|| name.split('.').filter(|part| *part != "base").collect::<Vec<_>>().join("."))
}

fn matches_path(pattern: &str, name: &str) -> bool {
    let tails = name.match_indices('.').map(|(dot, _)| &name[dot + 1..]);
    glob(pattern.as_bytes(), name.as_bytes())
        || (!pattern.starts_with('*')
            && tails.into_iter().any(|tail| glob(pattern.as_bytes(), tail.as_bytes())))
}

/// Whether the pattern matches the whole text.
fn glob(pattern: &[u8], text: &[u8]) -> bool {
    let (mut p, mut t) = (0, 0);
    // The position of the last star, and the end of the text that the star matches so far.
    let mut star: Option<(usize, usize)> = None;
    while t < text.len() {
        if pattern.get(p) == Some(&b'*') {
            star = Some((p, t));
            p += 1;
        } else if pattern.get(p) == Some(&text[t]) {
            (p, t) = (p + 1, t + 1);
        } else if let Some((at, given)) = star {
            star = Some((at, given + 1));
            (p, t) = (at + 1, given + 1);
        } else {
            return false;
        }
    }
    pattern[p..].iter().all(|&c| c == b'*')
}

/// Returns up to three names closest to a pattern, by edit distance to as many trailing parts of the name as the pattern has.
#[must_use]
pub fn nearest<'a>(pattern: &str, names: impl IntoIterator<Item = &'a str>) -> Vec<&'a str> {
    let parts = pattern.split('.').count();
    let mut ranked: Vec<(usize, &str)> = names
        .into_iter()
        .map(|name| {
            let cut = name.rmatch_indices('.').nth(parts - 1).map_or(0, |(dot, _)| dot + 1);
            (distance(pattern, &name[cut..]), name)
        })
        .collect();
    ranked.sort_by_key(|(distance, _)| *distance);
    ranked.into_iter().take(3).map(|(_, name)| name).collect()
}

/// Levenshtein distance: the number of insertions, deletions and substitutions that turn one text into the other.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, y) in b.iter().enumerate() {
            let change = diagonal + usize::from(x != *y);
            diagonal = row[j + 1];
            row[j + 1] = change.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

/// Returns the random number key of a name: a function of seed and name alone, independent of other draws.
#[doc(alias = "fold_in")]
#[must_use]
pub fn random_key(seed: u64, name: &str) -> u64 {
    name.bytes().fold(mix(seed), |key, byte| mix(key ^ u64::from(byte)))
}

/// A bijection of 64 bits in which every input bit reaches every output bit: the finalizer of SplitMix64 (Steele, Lea
/// and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).
fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn glob_patterns_match_names_and_their_suffixes() {
        let name = "h.10.attn.c_attn.weight";
        for yes in [
            "*",
            "weight",
            "c_attn.weight",
            "h.*.weight",
            "h.10.*",
            "attn.c_attn.*",
            "*weight",
            "*10*",
            "c_attn.*t",
        ] {
            assert!(matches(yes, name), "{yes}");
        }
        for no in
            ["", "attn.weight", "h.1.*", "*.bias", "h", "c_attn", "eight", "h.*.attn", "weight.", "*c_proj*"]
        {
            assert!(!matches(no, name), "{no}");
        }
        assert!(matches("a*b*c", "axbybzc") && !matches("a*b*c", "axbybz"));
    }

    #[test]
    fn patterns_see_through_wrappers() {
        let name = "h.0.attn.q_proj.base.weight";
        for yes in ["q_proj.weight", "*.q_proj.weight", "q_proj.base.weight", "*.base.*", "h.*.weight"] {
            assert!(matches(yes, name), "{yes}");
        }
        assert!(!matches("q_proj.base.weight", "h.0.attn.q_proj.weight"));
        assert!(!matches("data.weight", "database.weight"));
    }

    #[test]
    fn nearest_orders_names_by_edit_distance() {
        let names =
            ["h.0.attn.c_attn.weight", "h.0.attn.c_proj.weight", "wte.weight", "h.0.attn.c_attn.bias"];
        assert_eq!(nearest("c_atn.weight", names)[0], "h.0.attn.c_attn.weight");
        assert_eq!(nearest("wte.wieght", names)[0], "wte.weight");
        assert_eq!(nearest("x", names).len(), 3);
        assert_eq!((distance("abc", "abc"), distance("abc", "ac"), distance("kitten", "sitting")), (0, 1, 3));
    }

    #[test]
    fn random_keys_differ_by_seed_and_name() {
        let mut keys: Vec<u64> =
            (0..50).flat_map(|seed| ["a", "b", "ab", "ba", ""].map(|name| random_key(seed, name))).collect();
        keys.sort_unstable();
        keys.dedup();
        assert_eq!(keys.len(), 250);
        assert_eq!(random_key(7, "wte.weight"), random_key(7, "wte.weight"));
    }
}
