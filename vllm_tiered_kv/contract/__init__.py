# SPDX-License-Identifier: Apache-2.0
"""What we need of vLLM, and whether a vLLM has it.

:mod:`.needs` says once, as data, what we override, call and read. It is compared with the vLLM that
is running (:mod:`.check`, when the connector is imported) and with any release's source
(``python -m tools.contract``). Nothing here imports vLLM before it is asked about it.
"""
