//! A cache of layout inferences, by all that inference reads.
//!
//! A cached inference is returned only for a key that equals the stored key in every part; addresses and the hash only
//! say where to look.

use crate::execution::direct_mapped_cache::DirectMappedCache;
use crate::layout::Layout;
use crate::layout::fast_hasher::{FastBuildHasher, FastHasher};
use crate::layout::infer::{Inference, Rule, infer};
use crate::layout::refusal::Refusal;
use crate::layout::signature::Signature;
use shardgrad_kernels::DType;
use smallvec::SmallVec;
use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::rc::Rc;

/// The cache is cleared when it reaches this size, so that shapes that change in every step do not fill the memory.
const ENTRIES_MAX: usize = 4_096;

/// All inputs of [`infer`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct InferenceKey<'a> {
    /// Equal texts share one signature in the context.
    pub(crate) signature: &'a Rc<Signature>,
    pub(crate) linear_in: &'static [&'static [usize]],
    pub(crate) differentiable: &'static [bool],
    pub(crate) args: &'a [&'a Layout],
    pub(crate) out_dtypes: &'a [DType],
    pub(crate) want: &'a [Option<Layout>],
}

/// A cached inference with an owned copy of its key. It keeps the signature alive, so that no other signature gets its
/// address.
struct CachedInference {
    signature: Rc<Signature>,
    linear_in: &'static [&'static [usize]],
    differentiable: &'static [bool],
    args: SmallVec<[Layout; 2]>,
    out_dtypes: SmallVec<[DType; 4]>,
    want: SmallVec<[Option<Layout>; 1]>,
    inference: Rc<Inference>,
}

impl CachedInference {
    fn new(key: &InferenceKey<'_>, inference: Inference) -> CachedInference {
        CachedInference {
            signature: key.signature.clone(),
            linear_in: key.linear_in,
            differentiable: key.differentiable,
            args: key.args.iter().map(|l| (*l).clone()).collect(),
            out_dtypes: SmallVec::from_slice(key.out_dtypes),
            want: key.want.iter().cloned().collect(),
            inference: Rc::new(inference),
        }
    }

    fn matches(&self, key: &InferenceKey<'_>) -> bool {
        Rc::ptr_eq(&self.signature, key.signature)
            && same(self.linear_in, key.linear_in)
            && same(self.differentiable, key.differentiable)
            && self.args.len() == key.args.len()
            && self.args.iter().zip(key.args).all(|(known, wanted)| known == *wanted)
            && self.out_dtypes.as_slice() == key.out_dtypes
            && self.want.as_slice() == key.want
    }
}

/// Whether two lists that an op declares are equal. Nearly always both are the same slice, or empty: skip comparing the
/// memory of empty slices, whose pointers are dangling.
fn same<T: PartialEq>(a: &[T], b: &[T]) -> bool {
    std::ptr::eq(a, b) || a.iter().eq(b)
}

/// Entries with one hash: nearly always one.
type Bucket = SmallVec<[Rc<CachedInference>; 1]>;

/// The layout inferences of one rank.
#[derive(Default)]
pub(crate) struct InferenceCache {
    /// By the addresses of the parts of the key.
    recent: DirectMappedCache<CachedInference>,
    /// By the hash of the key.
    known: RefCell<HashMap<u64, Bucket, FastBuildHasher>>,
}

impl InferenceCache {
    /// Returns the cached inference of a key, or infers and caches it. Refusals are not cached.
    ///
    /// # Errors
    /// As [`infer`].
    pub(crate) fn get_or_infer(&self, key: &InferenceKey<'_>) -> Result<Rc<Inference>, Refusal> {
        self.get_or_infer_at(address_hash(key), || hash(key), key)
    }

    fn get_or_infer_at(
        &self,
        place: u64,
        hash: impl FnOnce() -> u64,
        key: &InferenceKey<'_>,
    ) -> Result<Rc<Inference>, Refusal> {
        let accept = |known: &Rc<CachedInference>| known.matches(key).then(|| known.inference.clone());
        if let Some(inference) = self.recent.get(place, accept) {
            return Ok(inference);
        }
        let known = self.cached_at(hash(), key)?;
        self.recent.insert(place, &known);
        Ok(known.inference.clone())
    }

    fn cached_at(&self, hash: u64, key: &InferenceKey<'_>) -> Result<Rc<CachedInference>, Refusal> {
        if let Some(known) = self.known.borrow().get(&hash)
            && let Some(known) = known.iter().find(|k| k.matches(key))
        {
            return Ok(known.clone());
        }
        let want: SmallVec<[Option<&Layout>; 4]> = key.want.iter().map(Option::as_ref).collect();
        let InferenceKey { signature, linear_in, differentiable, args, out_dtypes, .. } = *key;
        let inference = infer(&Rule { signature, linear_in, differentiable }, args, out_dtypes, &want)?;
        let new = Rc::new(CachedInference::new(key, inference));
        let mut known = self.known.borrow_mut();
        if known.len() >= ENTRIES_MAX {
            known.clear();
        }
        known.entry(hash).or_default().push(new.clone());
        Ok(new)
    }
}

impl fmt::Debug for InferenceCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "InferenceCache({} answers)", self.known.borrow().len())
    }
}

/// The slot of a key by the addresses of its handles.
fn address_hash(key: &InferenceKey<'_>) -> u64 {
    let mut hasher = FastHasher::default();
    hasher.write_usize(Rc::as_ptr(key.signature).addr());
    key.args.iter().for_each(|l| hasher.write_usize(l.address()));
    key.want.iter().flatten().for_each(|l| hasher.write_usize(l.address()));
    hasher.finish()
}

/// The hash of a key. It leaves out `linear_in` and `differentiable`, which nearly always go with the signature.
fn hash(key: &InferenceKey<'_>) -> u64 {
    let mut hasher = FastHasher::default();
    hasher.write_usize(Rc::as_ptr(key.signature).addr());
    key.args.iter().for_each(|l| l.hash(&mut hasher));
    key.out_dtypes.hash(&mut hasher);
    key.want.hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardgrad_dist::Mesh;

    /// A key that owns its parts.
    struct OwnedKey {
        signature: Rc<Signature>,
        linear_in: &'static [&'static [usize]],
        differentiable: &'static [bool],
        args: Vec<Layout>,
        out_dtypes: Vec<DType>,
        want: Vec<Option<Layout>>,
    }

    impl OwnedKey {
        fn get(&self, cache: &InferenceCache) -> Rc<Inference> {
            let args: Vec<&Layout> = self.args.iter().collect();
            let key = InferenceKey {
                signature: &self.signature,
                linear_in: self.linear_in,
                differentiable: self.differentiable,
                args: &args,
                out_dtypes: &self.out_dtypes,
                want: &self.want,
            };
            // One slot and one hash for all keys, so that only the comparison tells them apart.
            cache.get_or_infer_at(0, || 0, &key).unwrap()
        }
    }

    fn layouts(mesh: &str, texts: &[&str]) -> Vec<Layout> {
        let mesh = Mesh::parse(mesh).unwrap();
        texts.iter().map(|t| Layout::parse(t, &mesh).unwrap()).collect()
    }

    /// Keys that each differ from the first in one part.
    fn keys() -> Vec<OwnedKey> {
        let signature = Rc::new(Signature::parse("..m, ..m -> ..m").unwrap());
        let base = |mesh: &str, args: &[&str]| OwnedKey {
            signature: signature.clone(),
            linear_in: &[&[0, 1]],
            differentiable: &[],
            args: layouts(mesh, args),
            out_dtypes: vec![DType::F32],
            want: vec![],
        };
        let plain = |mesh: &str| base(mesh, &["f32[12, 4] +a", "f32[12, 4] +a"]);
        let with = |args: &[&str]| base("a=2,b=3", args);
        let other = Rc::new(Signature::parse("..m d!, ..m d! -> ..m d!").unwrap());
        let created = Rc::new(Signature::parse("..m, ..m -> ..m d").unwrap());
        let wanted = |text: &str| OwnedKey {
            signature: created.clone(),
            want: layouts("a=2,b=3", &[text]).into_iter().map(Some).collect(),
            ..plain("a=2,b=3")
        };
        vec![
            plain("a=2,b=3"),
            plain("a=3,b=2"),
            OwnedKey { signature: other, ..plain("a=2,b=3") },
            OwnedKey { linear_in: &[], ..plain("a=2,b=3") },
            OwnedKey { linear_in: &[&[0], &[1]], ..plain("a=2,b=3") },
            OwnedKey { out_dtypes: vec![DType::F64], ..plain("a=2,b=3") },
            with(&["f32[12, 4] +b", "f32[12, 4] +b"]),
            with(&["f32[12, 4] +a", "f32[12, 4] +a ~b"]),
            OwnedKey { differentiable: &[true, false], ..with(&["f32[12, 4] +a", "f32[12, 4] +a ~b"]) },
            with(&["f64[12, 4] +a", "f64[12, 4] +a"]),
            with(&["f32[12@b, 4] +a", "f32[12@b, 4] +a"]),
            with(&["f32[12, 4@b] +a", "f32[12, 4@b] +a"]),
            with(&["f32[12@a@b, 4]", "f32[12@a@b, 4]"]),
            with(&["f32[12@b@a, 4]", "f32[12@b@a, 4]"]),
            with(&["f32[12:6, 4] +a", "f32[12:6, 4] +a"]),
            with(&["f32[24, 4] +a", "f32[24, 4] +a"]),
            wanted("f32[12, 4, 6]"),
            wanted("f32[12, 4, 6@b]"),
            wanted("f32[12, 4, 9]"),
        ]
    }

    #[test]
    fn every_part_of_a_key_is_compared() {
        let (cache, text) = (InferenceCache::default(), |i: &Inference| format!("{i:?}"));
        let fresh: Vec<String> = keys().iter().map(|q| text(&q.get(&InferenceCache::default()))).collect();
        // Later keys find the entries of all earlier keys in their slot.
        let keys = keys();
        for _ in 0..2 {
            for (i, key) in keys.iter().enumerate() {
                assert_eq!(text(&key.get(&cache)), fresh[i], "key {i} got the inference of another key");
            }
        }
        assert_eq!(cache.known.borrow()[&0].len(), keys.len(), "each was inferred once");
        assert!(Rc::ptr_eq(&keys[0].get(&cache), &keys[0].get(&cache)));
    }

    #[test]
    fn number_of_entries_is_bounded() {
        let cache = InferenceCache::default();
        let key = &keys()[0];
        let args: Vec<&Layout> = key.args.iter().collect();
        for hash in 0..2 * ENTRIES_MAX as u64 + 1 {
            let key = InferenceKey {
                signature: &key.signature,
                linear_in: key.linear_in,
                differentiable: key.differentiable,
                args: &args,
                out_dtypes: &key.out_dtypes,
                want: &key.want,
            };
            // Bypasses the direct-mapped cache, which would serve all of these.
            let _ = cache.cached_at(hash, &key).unwrap();
        }
        assert!(cache.known.borrow().len() <= ENTRIES_MAX);
    }
}
