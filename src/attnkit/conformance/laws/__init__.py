"""Laws that need more than one run to be seen: what must not matter, does not.

In: a `Subject`. Out: nothing, or `LawBroken`; `NotClaimed` where the backend refuses what the law is
about. Each law is one function of the table `LAWS`, and its first line says what it demands. Single
runs are judged on the way (`checks`), so a law also fails when one of its runs is simply wrong.

    law        what a law is and starts from
    pages      where tokens stand
    batches    what else is in the batch
    trees      drafts that branch
    calls      arguments and results of one call
    captured   graphs
"""

from attnkit.conformance.laws import batches, calls, captured, pages, trees
from attnkit.conformance.laws.law import Law

LAWS: dict[str, Law] = {
    law.__name__: law
    for law in (
        pages.pages_do_not_matter,
        pages.unread_memory_does_not_matter,
        batches.runs_are_repeatable,
        batches.batch_mates_do_not_matter,
        batches.order_of_requests_does_not_matter,
        batches.splitting_a_prompt_does_not_matter,
        batches.padding_does_not_matter,
        batches.new_tokens_are_seen_once,
        batches.plans_are_not_remembered,
        pages.plan_follows_another_block_table,
        pages.block_size_does_not_matter,
        pages.parts_merge_by_their_lse,
        batches.causality_is_per_request,
        trees.a_tree_is_its_paths,
        calls.strides_do_not_matter,
        calls.lse_is_float32_per_token_and_head,
        calls.codes_of_outputs_are_those_of_numbers,
        calls.the_users_path_is_the_same,
        pages.shared_cache_is_only_read,
        calls.profiling_writes_zeros,
        pages.unwritten_slots_stay,
        calls.scales_of_what_is_not_quantised_do_not_matter,
        batches.the_device_has_the_last_word_on_lengths,
        captured.captured_steps_replay,
    )
}
"""Name -> law, in the order they are checked."""

__all__ = ["LAWS", "Law"]
