"""The durable record of groups, batches and publications. Stored payloads are frames of `contracts.group_codec` or Atropos JSON."""

from rollbook.contracts.group_codec import register_payload_decoder
from rollbook.ledger.atropos.codec import decode_scored_data

register_payload_decoder(b"{", decode_scored_data)
